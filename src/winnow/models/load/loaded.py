"""Result of loading a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from winnow.attention import Spans
from winnow.cache import CacheLayout
from winnow.cache.recurrent import RecurrentStates
from winnow.config import CacheConfig
from winnow.models.bind.rotation import ModelRotation, find_rotation
from winnow.models.model.blocks import BlockWeights, LibraryLayers
from winnow.models.model.geometry import ModelGeometry
from winnow.models.model.kv_layout import configured_layout
from winnow.process.ranks import ALONE, Ranks
from winnow.prompt.prompts import TEXT_ALONE
from winnow.sampling.grammar import GrammarCompiler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from winnow.models.bind.binding import AttentionStep
    from winnow.models.fast.packed.decoder import PackedDecoder
    from winnow.models.load.processor import PackedImages
    from winnow.prompt.prompts import ImageProcessor

    ServedModel: TypeAlias = PreTrainedModel | PackedDecoder


@dataclass(frozen=True)
class Verified:
    """Distance of Winnow's logits from those of the model's own code."""

    difference: float  # as a part of the norm of the model's own logits; NaN where those are not finite
    tolerance: float
    num_tokens: int
    past: int  # tokens before those whose masks were compared; 0: the model builds none


@dataclass(frozen=True)
class PlainModel:
    model: "ServedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Sampling parameters that the model's makers recommend, for requests that bring none."""
    processor: "ImageProcessor | str" = field(default=TEXT_ALONE, kw_only=True)
    """For pictures; text: why there is none."""

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @cached_property
    def device(self) -> torch.device:
        return self.model.device  # which looks through its parameters

    @cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_token_ids)


@dataclass(frozen=True)
class LoadedModel(PlainModel):
    """A model bound to the paged cache."""

    geometry: ModelGeometry
    trained_len: int
    """Longest sequence whose positions the model knows."""
    decoder: "PackedDecoder | None" = None
    """The parts of `model` without transformers' code between them, where they compute the same."""
    unfused: Mapping[int, str] = field(default_factory=dict)
    """Reasons for which layers, by their number, are computed by transformers' code though others might be faster."""
    blocks: BlockWeights | None = None
    library: LibraryLayers | None = None
    ranks: Ranks = ALONE
    """Ranks that compute it together: `model` and `geometry` are this one's part."""
    verified: Verified | None = None
    """Distance of what answers from the model's own code; None: it was not compared at load."""
    sparse_top_k: int | None = None
    """Keys that each token attends to, chosen among all by the layers themselves; None: it attends to all."""

    def kv_layout(
        self, config: CacheConfig, num_accumulators: int, chunk: int | None = None, *, bias: bool = False
    ) -> CacheLayout:
        """Return the shape of a cache for this model over all ranks; raises as `configured_layout`. A step computes at
        most `chunk` tokens of one sequence. With `bias` KVs have one, as with the option kv_bias."""
        geometry = self.geometry
        if chunk is not None and not isinstance(self.processor, str):
            chunk = max(chunk, self.processor.longest_run)
        layout = configured_layout(
            config,
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads * self.ranks.size,
            head_dim=geometry.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            num_accumulators=num_accumulators,
            windows=geometry.windows,
            chunk=chunk,
            bias=bias,
            state_bytes=sum(each.nbytes for each in geometry.states),
            shapes=[shape[1:] for shape in geometry.by_layer],
            latent=geometry.latent,
        )
        return replace(layout, ranks=self.ranks.size)

    def open_states(self, max_num_seqs: int) -> RecurrentStates | None:
        states = self.geometry.states
        return RecurrentStates(states, max_num_seqs, self.device) if states else None

    def compute(
        self,
        tokens: torch.Tensor,
        spans: Spans,
        wanted: torch.Tensor | int,
        step: "AttentionStep",
        states: RecurrentStates | None,
        images: "PackedImages | None" = None,
    ) -> torch.Tensor:
        """Return logits of a packed step of tokens, int64 [T]: [n, V].

        Args:
            wanted: tokens whose logits are wanted, int64 [n]; 0: all.
            states: as `open_states` gave them; they are after these tokens then.
            images: among the tokens, or before them where that moves their rotary positions.
        """
        more: dict[str, Any] = {"use_cache": False, "logits_to_keep": wanted, "winnow_step": step}
        model, positions = self.forward_model, spans.position[None]
        if images is not None:
            # A decoder of parts knows neither.
            model, more = self.model, more | images.arguments(self.model, tokens)
            if images.positions is not None:
                positions = images.positions[:, None]
        if states is not None:
            from winnow.models.bind.mixers import PackedStates

            more[self._cache_argument] = PackedStates(states, spans)
        logits: torch.Tensor = model(input_ids=tokens[None], position_ids=positions, **more).logits
        return logits[0]

    def with_hidden_states(self) -> "LoadedModel":
        """Return it as a model whose last hidden states of all tokens can be read, at `text_part`'s end."""
        for module in cast(Any, self.model).modules():
            if getattr(module, "last_layer_only_wanted", False):
                module.last_layer_only_wanted = False
        return replace(self, decoder=None)

    @cached_property
    def _cache_argument(self) -> str:
        from winnow.models.bind.binding import cache_argument

        return cache_argument(self.model)

    @property
    def forward_model(self) -> "ServedModel":
        return self.model if self.decoder is None else self.decoder

    @cached_property
    def rotation(self) -> ModelRotation | None:
        return find_rotation(self.model, self.geometry.num_layers)
