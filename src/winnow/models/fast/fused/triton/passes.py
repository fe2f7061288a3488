"""Launches of the passes, with the interface of `winnow.models.fast.fused.kernels.LayerKernels`."""

import torch
import triton
from torch import Tensor

from winnow.models.fast.fused.forms import Activation, NormWeight
from winnow.models.fast.fused.triton.kernels import add_normed_rows, gate_rows, rms_norm_rows, rotate_heads

# Elements of a row that a program of `gate_rows` has.
_GATE_BLOCK = 1024


class TritonPasses:
    """The passes on a GPU, each one launch; see `winnow.models.fast.fused.layer.LayerPasses`."""

    def rms_norm(self, x: Tensor, norm: NormWeight, add: Tensor | None = None) -> Tensor:
        """Return the norm of x, [T, size]; `add`, of the same shape, is first added to x in place."""
        assert x.is_contiguous() and (add is None or (add.is_contiguous() and add.shape == x.shape))
        out, (rows, size) = torch.empty_like(x), x.shape
        if rows:
            block, warps = _row_launch(size)
            rms_norm_rows[(rows,)](
                x, add, out, norm.weight, size, norm.eps, norm.one_plus, block, num_warps=warps
            )
        return out

    def add_normed(self, x: Tensor, norm: NormWeight, to: Tensor, *, in_place: bool = True) -> Tensor:
        """Return `to`, [T, size], plus the norm of x, of its shape."""
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
        """Norm and rotate queries and keys in place, as `LayerPasses` has it."""
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
        """Return activation(gate) * up, [T, F], of both side by side, [T, 2 * F]."""
        assert gate_up.is_contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        if rows:
            block = min(_GATE_BLOCK, triton.next_power_of_2(size))
            gelu = activation == Activation.gelu_tanh
            gate_rows[(rows, triton.cdiv(size, block))](gate_up, out, size, gelu, block, num_warps=4)
        return out


def _row_launch(size: int) -> tuple[int, int]:
    """Return the extent of a row's tile, and warps for it."""
    block = triton.next_power_of_2(size)
    return block, min(max(block // 512, 1), 16)
