"""An embedding whose rows are read out of the packed weight of the head that shares them: one copy serves both."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from winnow.models.packed_linear import PackedLinear

if TYPE_CHECKING:
    from winnow.models.fused.kernels import LayerKernels


class PackedEmbedding(nn.Module):
    """Looks up rows as `nn.Embedding` does, to the last bit.

    Args:
        head: of the weight [num_tokens, in_features] that the embedding shares; a bias of it changes nothing here.
    """

    def __init__(self, head: PackedLinear, kernels: "LayerKernels") -> None:
        super().__init__()
        self._weight, self._kernels = head.packed, kernels
        # A parameter: where no other is left, it tells the model's type and device. Codes of 8 bits would not.
        rows = torch.empty(0, dtype=head.packed.dtype) if head.is_int8 else head.packed.packed
        self.packed = nn.Parameter(rows, requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens, int [...] -> rows, [..., in_features]."""
        return self._kernels.unpack_rows(self._weight, tokens.long())
