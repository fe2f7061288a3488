"""An embedding whose rows are read out of the packed weight of the head that shares them: one copy serves both."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from winnow.models.fast.fused.kernels import LayerKernels, PackedWeight


class PackedEmbedding(nn.Module):
    """Embedding that looks up rows as `nn.Embedding` does, to the last bit.

    Args:
        weight: [num_tokens, in_features], which a head may share.
        scale: factor of the rows; None: they stay as they are.
    """

    def __init__(self, weight: "PackedWeight", kernels: "LayerKernels", scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.table, self._kernels = weight, kernels
        # A parameter: where no other is left, it tells the model's type and device. Codes would not.
        rows = weight.packed if weight.panels is None else torch.empty(0, dtype=weight.dtype, device="cpu")
        self.packed = nn.Parameter(rows, requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int [...] -> rows, [..., in_features]."""
        rows = self._kernels.unpack_rows(self.table, tokens.long())
        return rows if self.scale is None else rows * torch.tensor(self.scale, dtype=rows.dtype, device="cpu")


class ScaledEmbedding(nn.Module):
    """Rows of a table [num_tokens, size], times a factor."""

    def __init__(self, weight: Tensor, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(weight, requires_grad=False), scale

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int [...] -> rows, [..., size]."""
        rows = self.weight[tokens.long()]
        return rows * torch.tensor(self.scale, dtype=rows.dtype, device="cpu")


def embedding_scale(embedding: nn.Module) -> float | None:
    """Return the factor by which a scaled embedding of transformers multiplies its rows (Gemma); None: no factor."""
    scale = getattr(embedding, "embed_scale", None)
    return float(scale) if isinstance(scale, Tensor | float | int) else None
