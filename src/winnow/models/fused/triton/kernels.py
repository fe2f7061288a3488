"""Kernels of the passes: a program has a row, or a part of it, in registers; arithmetic is float32."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_rows(x, add, out, weight, size, eps, ONE_PLUS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the norms of rows of x; `add` is first added to x in place. Grid (T)."""
    row, column = tl.program_id(0).to(tl.int64) * size, tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if add is not None:
        value += tl.load(add + row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + row + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value) / size + eps)
    normed = _weighted(value * scale, weight, column, inside, ONE_PLUS)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_normed_rows(x, to, out, weight, size, eps, ONE_PLUS: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows of `to` plus the norms of x's; `out` may be `to`. Grid (T)."""
    row, column = tl.program_id(0).to(tl.int64) * size, tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value) / size + eps)
    normed = _weighted(value * scale, weight, column, inside, ONE_PLUS)
    total = tl.load(to + row + column, mask=inside, other=0.0).to(tl.float32) + normed
    tl.store(out + row + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads(
    heads,
    row_stride,
    cos,
    sin,
    query_norm,
    key_norm,
    query_eps,
    key_eps,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    QUERY_ONE_PLUS: tl.constexpr,
    KEY_ONE_PLUS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """Norm and rotate a query or key in place, dimension i with i + HALF. Grid (T, query and KV heads).

    A thread holds both dimensions of a pair: no other reads what it overwrites.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = heads + token * row_stride + head * HEAD_DIM
    i, rest = tl.arange(0, BLOCK), 2 * HALF + tl.arange(0, REST)
    paired, beyond = i < HALF, rest < HEAD_DIM
    first = tl.load(start + i, mask=paired, other=0.0).to(tl.float32)
    second = tl.load(start + HALF + i, mask=paired, other=0.0).to(tl.float32)
    last = tl.load(start + rest, mask=beyond, other=0.0).to(tl.float32)
    square = (tl.sum(first * first) + tl.sum(second * second) + tl.sum(last * last)) / HEAD_DIM
    if query_norm is not None:
        if head < QUERY_HEADS:
            scale = 1 / tl.sqrt(square + query_eps)
            first = _weighted(first * scale, query_norm, i, paired, QUERY_ONE_PLUS)
            second = _weighted(second * scale, query_norm, HALF + i, paired, QUERY_ONE_PLUS)
            last = _weighted(last * scale, query_norm, rest, beyond, QUERY_ONE_PLUS)
    if key_norm is not None:
        if head >= QUERY_HEADS:
            scale = 1 / tl.sqrt(square + key_eps)
            first = _weighted(first * scale, key_norm, i, paired, KEY_ONE_PLUS)
            second = _weighted(second * scale, key_norm, HALF + i, paired, KEY_ONE_PLUS)
            last = _weighted(last * scale, key_norm, rest, beyond, KEY_ONE_PLUS)
    at = token * (2 * HALF) + i
    turned = first * _part(cos, at, paired) - second * _part(sin, at, paired)
    after = second * _part(cos, at + HALF, paired) + first * _part(sin, at + HALF, paired)
    kind = heads.dtype.element_ty
    tl.store(start + i, turned.to(kind), mask=paired)
    tl.store(start + HALF + i, after.to(kind), mask=paired)
    tl.store(start + rest, last.to(kind), mask=beyond)


@triton.jit
def gate_rows(gate_up, out, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Store activation(gate) * up, of both side by side. Grid (T, parts of a row)."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # 0.5 (1 + tanh(z)) is the sigmoid of 2 z
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = gate * tl.sigmoid(gate)
    tl.store(out + row * size + column, (active * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weighted(value, weight, column, inside, ONE_PLUS: tl.constexpr):
    factor = _part(weight, column, inside)
    if ONE_PLUS:
        factor += 1
    return value * factor


@triton.jit
def _part(pointer, at, inside):
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)
