"""Kernels of the passes: a program has a row, or a part of it, in registers; arithmetic is float32."""

import triton
import triton.language as tl

from winnow.attention.triton.kernels.rotate import rotate_vectors, weighted


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
    normed = weighted(value * scale, weight, column, inside, ONE_PLUS)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_normed_rows(x, to, out, weight, size, eps, ONE_PLUS: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows of `to` plus the norms of x's; `out` may be `to`. Grid (T)."""
    row, column = tl.program_id(0).to(tl.int64) * size, tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value) / size + eps)
    normed = weighted(value * scale, weight, column, inside, ONE_PLUS)
    total = tl.load(to + row + column, mask=inside, other=0.0).to(tl.float32) + normed
    tl.store(out + row + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads(
    heads, row_stride, cos, sin, query_norm, key_norm, query_eps, key_eps, QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, QUERY_ONE_PLUS: tl.constexpr, KEY_ONE_PLUS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a query or key in place, dimension i with i + HALF. Grid (T, query and KV heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = heads + token * row_stride + head * HEAD_DIM + tl.zeros([1], tl.int64)
    shown = tl.full([1], 1, tl.int1)
    if head < QUERY_HEADS:
        rotate_vectors(
            start, shown, token, cos, sin, query_norm, query_eps, HEAD_DIM, HALF, QUERY_ONE_PLUS, BLOCK, REST
        )
    else:
        rotate_vectors(
            start, shown, token, cos, sin, key_norm, key_eps, HEAD_DIM, HALF, KEY_ONE_PLUS, BLOCK, REST
        )


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
