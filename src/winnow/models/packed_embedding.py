"""An embedding whose rows are read out of the packed weight of the head that shares them: one copy serves both."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from winnow.models.packed_linear import PackedLinear

if TYPE_CHECKING:
    from winnow.models.fused.kernels import LayerKernels


class PackedEmbedding(nn.Module):
    """Looks up rows as `nn.Embedding` does, to the last bit.

    A packed weight is cut into panels of so many rows; in a panel their elements lie side by side, alone or in pairs.

    Args:
        head: of the weight [num_tokens, in_features] that the embedding shares; a bias of it changes nothing here.
    """

    def __init__(self, head: PackedLinear, kernels: "LayerKernels") -> None:
        super().__init__()
        packed = head.packed.packed
        panel, together = panel_shape(kernels, packed.dtype)
        # A parameter: where no other is left, it tells the model's type and device.
        self.panels = nn.Parameter(
            packed.view(-1, head.in_features // together, panel, together), requires_grad=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens, int64 [...] -> rows, [..., in_features]."""
        dtype, panel = self.panels.dtype, self.panels.shape[2]
        # A pair of 16 bits each is moved as one number.
        words = (self.panels.view(torch.int32) if self.panels.shape[3] == 2 else self.panels).squeeze(-1)
        rows = words[tokens // panel, :, tokens % panel]
        return rows.view(dtype)


def panel_shape(kernels: "LayerKernels", dtype: torch.dtype) -> tuple[int, int]:
    """Rows of a panel, and how many elements of a row lie together; both depend on the instruction set."""
    weight = torch.tensor([[1, 2], [3, 4]], dtype=dtype)
    packed = kernels.pack(weight).packed
    return len(packed) // weight.shape[1], 2 if packed[1] == weight[0, 1] else 1
