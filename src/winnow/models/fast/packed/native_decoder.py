"""A decoder in one native call, from tokens to logits."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from winnow.attention.native_step import NativeStep
from winnow.models.fast.fused.kernels import LayerKernels
from winnow.models.fast.fused.layer import FusedLayer, FusedNorm
from winnow.models.fast.packed_linear import PackedLinear
from winnow.native import Decoder


class NativeDecoder:
    """Decoder that computes what its parts, all of them native, would compute one after the other.

    Args:
        embedding: an `nn.Embedding`, or one of a packed weight's rows.
    """

    def __init__(
        self, embedding: Any, layers: Sequence[FusedLayer], norm: FusedNorm, head: PackedLinear
    ) -> None:
        self._parts = embedding, layers, norm, head  # what the native decoder points into
        self._kernels: LayerKernels = head.kernels
        self._vocab_size = head.out_features
        table = embedding.weight if isinstance(embedding, nn.Embedding) else None
        self._native = Decoder(
            embedding=0 if table is None else table.data_ptr(),
            embedding_rows=head.packed.native if table is not None else embedding.table.native,
            num_tokens=embedding.table.out_features if table is None else len(table),
            layers=[layer.stacked() for layer in layers],
            selects=layers[-1].last_layer_only_wanted,
            norm=norm.norm.native,
            head=head.packed.native,
            head_bias=0 if head.bias is None else head.bias.data_ptr(),
        )

    def __call__(
        self, tokens: Tensor, rotation: tuple[Tensor, Tensor], step: NativeStep, logits_indices: Tensor | None
    ) -> Tensor:
        """Map tokens, int64 [T] -> logits, [T, V], or [n, V] of those at `logits_indices`.

        Args:
            rotation: cos and sin of the positions from 0 on, [positions, rotary_dim].
            logits_indices: int64 [n]; None: all.
        """
        return self._kernels.decode(self._native, tokens, *rotation, step, logits_indices, self._vocab_size)
