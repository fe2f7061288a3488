"""Comparison of a model with its own code, made at load, so that no answer is wrong in silence.

Two things are compared. Logits of a short random prompt, which transformers computes with its eager attention and
Winnow as it will run: optimized layers, paged cache, a chunk and a single token. And masks: which keys the model lets a
token see at the end of its context, where Winnow attends by the windows that layers ask for. That takes no long prompt:
the model is shown a cache that claims a past, and is asked for the masks alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

from winnow.attention import open_backend
from winnow.errors import UnsupportedModelError
from winnow.models.bind.binding import attention_of, cache_argument, kv_layer_of
from winnow.models.load.loaded import LoadedModel, Verified
from winnow.models.load.paged_trial import HALF, differences_of, paged_logits, plain_layout, random_tokens
from winnow.models.model.blocks import stand_ins
from winnow.models.model.geometry import ModelGeometry
from winnow.models.model.kinds import takes_attention

_MASKS = "winnow_masks"
_TOKENS = 12
# A window is passed by the prompt itself where that is as cheap.
_LONGEST = 48
# Masks have a column for each token of the past. Contexts beyond this are checked up to here.
_LONGEST_PAST = 2**18
# Largest difference of a token's logits, as a part of their norm, in float32; elsewhere `HALF` of the median token.
_FULL = 1e-3


def _record_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    winnow_masks: dict[int, Tensor | None] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend without computing: query [1, Hq, T, d] -> zeros [1, T, Hq, d], and keep the layer's mask."""
    if winnow_masks is not None:
        winnow_masks[kv_layer_of(module)] = attention_mask
    batch, heads, tokens = query.shape[:3]
    return query.new_zeros((batch, tokens, heads, value.shape[-1])), None


def _whole_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return True where a token sees a key, [1, 1, T, keys]; never left out."""
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register(_MASKS, _record_mask)
AttentionMaskInterface.register(_MASKS, _whole_mask)


class _PastLayer(DynamicLayer):
    """A layer of a cache that claims to hold `past` tokens, and holds one."""

    def __init__(self, past: int) -> None:
        super().__init__()
        self._past = past

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        length = self._past + key_states.shape[-2]
        return tuple(  # type: ignore[return-value]
            states[..., :1, :].expand(*states.shape[:-2], length, states.shape[-1])
            for states in (key_states, value_states)
        )

    def update_indexer(self, keys: Tensor) -> Tensor:
        return keys[:, :1].expand(-1, self._past + keys.shape[1], -1)

    def get_seq_length(self) -> int:
        return self._past


@dataclass(frozen=True)
class Trial:
    """Outputs of a model's own code, kept until it can be compared with what will run in its place."""

    class_name: str
    tokens: Tensor  # int64 [T]
    logits: Tensor  # float32 [T, V]
    past: int

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel, geometry: ModelGeometry, trained_len: int) -> "Trial":
        """Compute it, before layers are replaced. Raises UnsupportedModelError: a layer's mask lets a token see other
        keys than its window does."""
        smallest = min((window for window in geometry.windows if window is not None), default=0)
        length = min(max(_TOKENS, smallest + 4 if smallest < _LONGEST else 0), trained_len)
        vocab_size = model.get_input_embeddings().weight.shape[0]
        tokens = random_tokens(vocab_size, length, model.device)
        positions = torch.arange(length, device=model.device)[None]
        with attention_of(model, "eager"):
            output = model(input_ids=tokens[None], position_ids=positions, use_cache=False)
        logits = output.logits[0].float()
        with attention_of(model, _MASKS), stand_ins(model):
            past = _check_masks(model, geometry, min(trained_len, _LONGEST_PAST) - 2)
        return cls(type(model).__name__, tokens, logits, past)

    @torch.inference_mode()
    def verify(self, loaded: LoadedModel, attention_backend: str) -> Verified:
        """Compare with the model as it will run. Raises UnsupportedModelError: the logits differ."""
        backend = open_backend(attention_backend, loaded.device)
        found = paged_logits(loaded, self.tokens, backend, plain_layout(loaded))
        full = loaded.dtype == torch.float32 and loaded.blocks is None and loaded.library is None
        tolerance = _FULL if full else HALF
        differences = differences_of(found, self.logits)
        if not len(differences):
            if found.isfinite().all():
                raise UnsupportedModelError(
                    f"model: {self.class_name}'s own code gives no logits that are finite: weights are NaN or infinite"
                )
            return Verified(float("nan"), tolerance, 0, self.past)
        difference = float(differences.max() if full else differences.median())
        if not difference <= tolerance:
            raise UnsupportedModelError(
                f"model: {self.class_name} is not supported: Winnow computes something else than its own code "
                f"(logits differ by {difference:.2g} of their norm, {tolerance:g} is allowed)"
            )
        return Verified(difference, tolerance, len(differences), self.past)


def _check_masks(model: PreTrainedModel, geometry: ModelGeometry, past: int) -> int:
    """Compare masks with windows for the last two tokens of a context. Returns the past, or 0 without masks."""
    if past < 1 or not takes_attention(type(model)):
        return 0
    masks: dict[int, Tensor | None] = {}
    depth = max(model.config.get_text_config().num_hidden_layers, geometry.num_layers)
    cache = {cache_argument(model): Cache(layers=[_PastLayer(past) for _ in range(depth)])}
    positions = torch.arange(past, past + 2, device=model.device)
    model(
        input_ids=torch.zeros_like(positions)[None],
        position_ids=positions[None],
        use_cache=not geometry.states,  # MiniMax would insist on a cache of its own
        winnow_masks=masks,
        **cache,
    )
    age = positions[:, None] - torch.arange(past + 2, device=model.device)
    checked = 0
    for layer, window in enumerate(geometry.windows):
        mask = masks.get(layer)
        if mask is None:
            continue
        sees = (mask if mask.dtype == torch.bool else mask == 0)[0, 0]
        expected = age >= 0
        if window is not None:
            reach = positions[:, None] % window + 1 if geometry.chunked else window
            expected &= age < reach
        checked = past
        if sees.shape != expected.shape or not torch.equal(sees, expected):
            raise UnsupportedModelError(
                f"model: {type(model).__name__} is not supported: layer {layer} tells its mask of a window or a "
                f"pattern that it does not ask attention for (position {past + 1} sees {int(sees[-1].sum())} keys, "
                f"not {int(expected[-1].sum())}); Winnow builds no masks"
            )
    return checked
