"""The norm between the last layer and the head, in one native pass."""

from torch import Tensor, nn

from winnow.models.fused.kernels import LayerKernels, NormWeight


class FusedNorm(nn.Module):
    """Takes the place of a root-mean-square norm: [..., size] -> the same shape."""

    def __init__(self, norm: NormWeight, kernels: LayerKernels) -> None:
        super().__init__()
        self.norm = norm
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x.reshape(-1, x.shape[-1]), self.norm).view_as(x)
