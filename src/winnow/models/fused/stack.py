"""All layers of a decoder in one native call."""

from collections.abc import Sequence

from torch import Tensor

from winnow import _native
from winnow.attention.native_step import NativeStep
from winnow.models.fused.kernels import LayerKernels
from winnow.models.fused.layer import FusedLayer


class FusedStack:
    """Computes what its layers, all of them native, would compute one after the other."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._layers = layers  # what `_native` points into
        self._kernels: LayerKernels = layers[0].kernels
        self._native = _native.DecoderStack([layer.stacked() for layer in layers])

    def __call__(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], step: NativeStep, wanted: Tensor | None
    ) -> Tensor:
        """The first layer's input, [T, hidden_size], which is overwritten -> the last one's output.

        Args:
            rotation: cos and sin, [T, rotary_dim].
            wanted: whose output is asked for, int64 [n]; None: all. A last layer that may not choose computes all.

        Returns:
            [n, hidden_size].
        """
        chosen = wanted if self._layers[-1].only_wanted else None
        out = self._kernels.decoder_stack(self._native, hidden, *rotation, step, chosen)
        return out[wanted] if chosen is None and wanted is not None else out
