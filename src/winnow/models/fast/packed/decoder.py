"""The forward pass of a packed model: embedding, fused layers, norm, head."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from winnow.attention.interface import NativeStep
from winnow.models.fast.fused.kernels import LayerKernels
from winnow.models.fast.fused.layer import FusedLayer, FusedNorm
from winnow.models.fast.packed_linear import PackedLinear
from winnow.process.native import Decoder

if TYPE_CHECKING:
    from winnow.models.bind.binding import AttentionStep


class NativeDecoder:
    """Decoder that computes what its parts, all of them native, would compute one after the other."""

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
        """Map tokens, int64 [T] -> logits, [T, V], or [n, V] of those at `logits_indices`, int64 [n]. The rotation is
        cos and sin of the positions from 0 on, [positions, rotary_dim]."""
        return self._kernels.decode(self._native, tokens, *rotation, step, logits_indices, self._vocab_size)


_FIRST_POSITIONS = 1024
"""That the rotation's table begins with."""


class Decoded(NamedTuple):
    """Outputs in the form of transformers' models."""

    logits: Tensor


class RotaryEmbedding(nn.Module):
    """Cosines and sines of position * frequency, times `scale`, both halves of a head alike (Llama). Frequencies are
    float32 [pairs]."""

    def __init__(self, frequencies: Tensor, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.inv_freq: Tensor
        # By this name `winnow.models.bind.rotation` knows them.
        self.register_buffer("inv_freq", frequencies)
        self.scale, self.dtype = scale, dtype
        self._table = frequencies[:0], frequencies[:0]

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.to(torch.float32)[..., None] * self.inv_freq
        cos, sin = ((part * self.scale).to(self.dtype) for part in (angle.cos(), angle.sin()))
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    def table(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of at least that number of positions from 0: [n, 2 * pairs] each."""
        if len(self._table[0]) < positions:
            longer = torch.arange(max(positions, 2 * len(self._table[0]), _FIRST_POSITIONS), device="cpu")
            cos, sin = self(longer[None])
            self._table = cos[0], sin[0]
        return self._table


class PackedDecoder(nn.Module):
    """Decoder that is called as transformers' causal models are, and gives what the model gave that it was packed from.
    Layers share the kinds of rotation, `rotaries`; `layer_rotaries` says which one each layer takes."""

    narrows = True
    """After some layers a step may say which tokens the others compute (`PagedAttentionStep.repair`)."""

    def __init__(
        self,
        embedding: nn.Module,
        rotaries: Sequence[RotaryEmbedding],
        layer_rotaries: Sequence[int],
        layers: Sequence[FusedLayer],
        norm: FusedNorm,
        head: PackedLinear,
    ) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = embedding, norm, head
        self.rotaries, self.layer_rotaries = nn.ModuleList(rotaries), tuple(layer_rotaries)
        self.layers = nn.ModuleList(layers)
        # The native decoder looks rows up as they are, and turns all layers alike.
        plain = len(rotaries) == 1 and getattr(embedding, "scale", None) is None
        self._native_decoder = NativeDecoder(embedding, layers, norm, head) if plain else None

    @property
    def dtype(self) -> torch.dtype:
        return self.head.packed.dtype

    @property
    def device(self) -> torch.device:
        return self.head.packed.packed.device

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: int | Tensor,
        winnow_step: "AttentionStep",
        **_: Any,
    ) -> Decoded:
        """Map input_ids and position_ids, int [1, T] -> logits [1, n, V] of tokens at `logits_to_keep`, [n]; 0: all."""
        logits_indices = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        assert logits_indices is not None or logits_to_keep == 0, "tokens are chosen by index"
        native: NativeStep | None = getattr(winnow_step, "native", None)
        repair = getattr(winnow_step, "repair", None)
        if self._native_decoder is not None and native is not None and repair is None:
            rotation = self._rotary(0).table(native.batch.end)
            return Decoded(self._native_decoder(input_ids[0], rotation, native, logits_indices)[None])
        hidden = self.embedding(input_ids)
        rotations = [self._rotary(index)(position_ids) for index in range(len(self.rotaries))]
        for number, (layer, index) in enumerate(zip(self.layers, self.layer_rotaries, strict=True)):
            if repair is not None and number == repair.first_layer:
                tokens, winnow_step = repair.narrow()
                hidden, logits_indices = hidden[:, tokens], getattr(winnow_step, "logits_indices")  # noqa: B009
                rotations = [(cos[:, tokens], sin[:, tokens]) for cos, sin in rotations]
            hidden = layer(hidden, position_embeddings=rotations[index], winnow_step=winnow_step)
        hidden = hidden if logits_indices is None else hidden[:, logits_indices]
        return Decoded(self.head(self.norm(hidden)))

    def _rotary(self, index: int) -> RotaryEmbedding:
        found = self.rotaries[index]
        assert isinstance(found, RotaryEmbedding)
        return found
