"""Launches of the passes, with the interface of `winnow.models.fast.fused.kernels.LayerKernels`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.attention.triton.kernels.rotate import rotate_vectors, weighted
from winnow.models.fast.fused.parts import Activation, NormWeight


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


# Elements of a row that a program of `gate_rows` has.
_GATE_BLOCK = 1024


class TritonPasses:
    """The passes on a GPU, each one launch; see `winnow.models.fast.fused.kernels.LayerKernels`."""

    def rms_norm(self, x: Tensor, norm: NormWeight, add: Tensor | None = None) -> Tensor:
        assert x.is_contiguous() and (add is None or (add.is_contiguous() and add.shape == x.shape))
        out, (rows, size) = torch.empty_like(x), x.shape
        if rows:
            block, warps = _row_launch(size)
            rms_norm_rows[(rows,)](
                x, add, out, norm.weight, size, norm.eps, norm.one_plus, block, num_warps=warps
            )
        return out

    def add_normed(self, x: Tensor, norm: NormWeight, to: Tensor, *, in_place: bool = True) -> Tensor:
        assert x.is_contiguous() and to.is_contiguous() and x.shape == to.shape and x.dtype == to.dtype
        out, (rows, size) = to if in_place else torch.empty_like(to), x.shape
        if rows:
            block, warps = _row_launch(size)
            add_normed_rows[(rows,)](
                x, to, out, norm.weight, size, norm.eps, norm.one_plus, block, num_warps=warps
            )
        return out

    def rotate(
        self, heads: Tensor, num_query_heads: int, num_kv_heads: int, head_dim: int, cos: Tensor,
        sin: Tensor, query_norm: NormWeight | None = None, key_norm: NormWeight | None = None,
    ) -> None:  # fmt: skip
        assert heads.stride(1) == 1 and cos.is_contiguous() and sin.is_contiguous()
        half = cos.shape[1] // 2
        if not len(heads):
            return
        rotate_heads[(len(heads), num_query_heads + num_kv_heads)](
            heads, heads.stride(0), cos, sin, None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight, 0.0 if query_norm is None else query_norm.eps,
            0.0 if key_norm is None else key_norm.eps, num_query_heads, head_dim, half,
            query_norm is not None and query_norm.one_plus, key_norm is not None and key_norm.one_plus,
            triton.next_power_of_2(half), triton.next_power_of_2(max(head_dim - 2 * half, 1)), num_warps=1,
        )  # fmt: skip

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        assert gate_up.is_contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        if rows:
            block = min(_GATE_BLOCK, triton.next_power_of_2(size))
            gelu = activation == Activation.gelu_tanh
            gate_rows[(rows, triton.cdiv(size, block))](gate_up, out, size, gelu, block, num_warps=4)
        return out


def _row_launch(size: int) -> tuple[int, int]:
    block = triton.next_power_of_2(size)
    return block, min(max(block // 512, 1), 16)
