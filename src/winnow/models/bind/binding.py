"""Binding of transformers' attention layers to Winnow's cache.

transformers lets a model take its attention from a registered function. Ours keeps no state: the step that is being
computed travels as a keyword argument of the model's own forward, down to each attention layer.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PretrainedConfig, PreTrainedModel

from winnow.attention import AttentionSpec
from winnow.errors import UnsupportedModelError
from winnow.models.model.kinds import takes_attention


class LatentHeads(nn.Module):
    """Expansion of latents to keys and values of heads (MLA), in place of a module's `kv_b_proj`.

    A token keeps its latent and one rotated key of all heads, side by side: the only key there is, whose first part is
    the value. With k = U c and v = V c for a latent c, q . k = (U^T q) . c, and a sum of values is V times that of
    latents. Source: DeepSeek-V2 (2405.04434), section 2.1.2. Packing leaves this weight alone, which is no `nn.Linear`.
    """

    def __init__(self, own: nn.Linear, key_size: int, num_heads: int) -> None:
        super().__init__()
        self.weight = own.weight
        self._key_size, self._num_heads = key_size, num_heads

    def forward(self, latents: Tensor) -> Tensor:
        return nn.functional.linear(latents, self.weight)

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries of latents and rotated keys, [1, Hq, T, rank + rotated], from those of keys."""
        up = self.weight.unflatten(0, (self._num_heads, -1))[:, : self._key_size]
        own, rotated = query.tensor_split([self._key_size], dim=-1)
        return torch.cat([own @ up, rotated], dim=-1)

    def expand(self, out: Tensor) -> Tensor:
        """Return attention of values, [T, Hq, v], from that of keys, [T, Hq, rank + rotated]."""
        up = self.weight.unflatten(0, (self._num_heads, -1))[:, self._key_size :]
        latents = out[..., : self.weight.shape[1]]
        return (latents.transpose(0, 1) @ up.mT).transpose(0, 1).contiguous()


def bind_latents(model: nn.Module, attentions: Collection[str]) -> None:
    """Let modules that expand latents hand latents to attention, where it is one of these implementations."""
    module: Any
    for module in model.modules():
        own, up = (getattr(module, name, None) for name in ("expand_kv", "kv_b_proj"))
        if own is not None and type(up) is nn.Linear and getattr(up, "bias", None) is None:
            module.kv_b_proj = LatentHeads(up, module.qk_nope_head_dim, module.num_heads)
            module.expand_kv = _latents_or(own, module, attentions)


def _latents_or(own: Callable[..., Any], module: Any, attentions: Collection[str]) -> Callable[..., Any]:
    def expand_kv(latents: Tensor, rotated: Tensor) -> Any:
        if _attends_by(module, attentions):
            return torch.cat([latents, rotated], dim=-1), latents
        return own(latents, rotated)

    return expand_kv


_ALL_KEYS = torch.zeros(1, 1, 1, 1, device="cpu")
"""Mask of layers that cannot do without, and what they choose of it: it masks nothing; that follows from positions."""


def bind_indexers(model: nn.Module, attentions: Collection[str]) -> None:
    """Let modules that choose keys by an index attend to all, where attention is one of these implementations: of as
    many as they choose (`sparse_top_k`) they choose all. Source: DeepSeek-V3.2 (2512.02556), section 2.1."""
    module: Any
    for module in model.modules():
        if hasattr(module, "indexer"):
            module.register_forward_pre_hook(partial(_unmask, attentions), with_kwargs=True)
            if module.indexer is not None:
                module.indexer.forward = _all_keys_or(module.indexer.forward, module, attentions)


def _unmask(attentions: Collection[str], module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return (args, kwargs | {"attention_mask": _ALL_KEYS}) if _attends_by(module, attentions) else None


def _all_keys_or(own: Callable[..., Any], module: Any, attentions: Collection[str]) -> Callable[..., Any]:
    return lambda *args, **kwargs: _ALL_KEYS if _attends_by(module, attentions) else own(*args, **kwargs)


def _attends_by(module: Any, attentions: Collection[str]) -> bool:
    return module.config._attn_implementation in attentions


ATTENTION_NAME = "winnow"
# What classes with attention of their own are told: it has masks, which some cannot do without.
_OWN = "winnow_own"
# Keyword arguments that transformers hands to every attention function and that change nothing here: there is no
# dropout in inference, no cache of transformers' own, and masks follow from positions.
_HARMLESS = (
    *("cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "is_causal", "logits_to_keep"),
    *("max_length_k", "max_length_q", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache"),
)


def cache_argument(model: nn.Module) -> str:
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let a model bound to `paged_attention` take its attention from elsewhere for a while."""
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, ATTENTION_NAME)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Let a model take its attention from a name; for a class that writes its own, whether "eager" or any other."""
    if takes_attention(type(model)):
        model.set_attn_implementation(attention_by_part(model.config, name))
    else:
        # Falcon's adds its slopes twice where attention is "eager".
        plain = "sdpa" if model._supports_sdpa else "eager"
        model.config._attn_implementation = plain if name == "eager" else _OWN


def attention_by_part(config: PretrainedConfig, name: str) -> str | dict[str, str]:
    """Return the `attn_implementation` argument: the named attention for the text part, each other part's default."""
    text = config.get_text_config()
    parts = {key: name for key in config.sub_configs if getattr(config, key, None) is text}
    return {"": name, **parts} if parts else name


class AttentionStep(Protocol):
    """One forward pass of a packed batch, seen from an attention layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Store k and v, [T, H, d], and attend with q, [T, Hq, d], over all KVs so far. Returns [T, Hq, d]."""


class KVLayers:
    """Layers of the cache that a module attends over in turn, where it attends several times in one pass."""

    def __init__(self, first: int) -> None:
        self.numbers = [first]
        self._taken = 0

    def take(self) -> int:
        """Return the number of the next; after the last comes the first."""
        self._taken += 1
        return self.numbers[(self._taken - 1) % len(self.numbers)]

    def __int__(self) -> int:
        return self.numbers[0]

    def restart(self, *_: Any) -> None:
        self._taken = 0


def kv_layer_of(module: nn.Module) -> int:
    """Return the layer of the cache that a module attends over next, once it has got its number."""
    layer: Any = module.kv_layer
    return layer.take() if isinstance(layer, KVLayers) else int(layer)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    winnow_step: AttentionStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: query [1, Hq, T, d], key and value [1, H, T, d] -> [1, T, Hq, d].

    Modules have a number in the cache, `kv_layer`, or several, from `probe_geometry`. Keys come rotated. No mask is
    ever built for this function; what a mask would say follows from positions. Raises UnsupportedModelError: the layer
    asks for something that attention here does not compute.
    """
    asked = [name for name, value in kwargs.items() if value is not None and value is not _ALL_KEYS]
    unknown = [name for name in asked if name not in _HARMLESS]
    name = type(module).__name__
    if unknown or (attention_mask is not None and attention_mask is not _ALL_KEYS):
        listed = ", ".join(unknown) or "a mask of its own"
        raise UnsupportedModelError(f"{name} asks attention for {listed}, which Winnow does not compute")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{name} is not causal; Winnow computes causal attention only")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    chunk = getattr(module, "kv_chunk", None)
    latent = getattr(module, "kv_b_proj", None)
    if isinstance(latent, LatentHeads):
        query, value = latent.absorb(query), key
    # Kernels read keys and values of one size: zeros behind a value add nothing.
    size = value.shape[-1]
    if size < key.shape[-1]:
        value = nn.functional.pad(value, (0, key.shape[-1] - size))
    out = winnow_step.attend(
        kv_layer_of(module),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionSpec(scale, chunk or sliding_window, softcap, s_aux, chunked=chunk is not None),
    )
    if isinstance(latent, LatentHeads):
        return latent.expand(out)[None], None
    return (out if size == out.shape[-1] else out[..., :size].contiguous())[None], None


# The registry is transformers' own; entering the same function twice is harmless. No mask function goes with it: that
# is what makes transformers skip mask building.
AttentionInterface.register(ATTENTION_NAME, paged_attention)


def _no_mask(batch_size: int, q_length: int, kv_length: int, *_: Any, **options: Any) -> Tensor:
    """Return one number for all logits, [B, 1, T, keys]: what a mask would say follows from positions."""
    dtype, device = options.get("dtype", torch.float32), options.get("device", "cpu")
    return torch.zeros((), dtype=dtype, device=device).expand(batch_size, 1, q_length, kv_length)


AttentionMaskInterface.register(_OWN, _no_mask)


class EmptyCache(Cache):
    """Cache of one pass that holds nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return 0


class _Counted(EmptyCache):
    """Cache of a packed pass: layers that count tokens behind those in a cache get positions."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the tokens before a sequence's first, for each token, [T]."""
        return self._before


def bind_counted_positions(model: PreTrainedModel) -> None:
    """Let layers that scale queries by positions of their own count (Llama 4) take those of a packed pass."""
    if not any(getattr(module, "attn_temperature_tuning", False) for module in model.modules()):
        return
    cache = cache_argument(model)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if model.config._attn_implementation != ATTENTION_NAME:
            return None
        return args, kwargs | {cache: _Counted(kwargs["position_ids"][0])}

    model.register_forward_pre_hook(enter, with_kwargs=True)


def bind_positions(model: PreTrainedModel, attention: AbstractContextManager[None]) -> int:
    """Let a model take positions that are counted from 0, whatever it calls the first; return that number. RoBERTa's
    table begins with places that are none; the model adds them itself only where it is given no positions. In the
    context `attention` the model attends by code of its own."""
    with attention:
        first = _first_position(model)
    if first:

        def shift(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = kwargs.get("position_ids")
            return None if given is None else (args, kwargs | {"position_ids": given + first})

        model.register_forward_pre_hook(shift, with_kwargs=True)
    return first


@torch.inference_mode()
def _first_position(model: PreTrainedModel) -> int:
    """Return what the model itself looks up for a first token beyond what it does for position 0."""
    words = model.get_input_embeddings()
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not words]
    if not tables:
        return 0
    found: list[list[Tensor]] = []

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(args[0], Tensor):  # RoFormer asks for as many as there are tokens
            found[-1].append(args[0])

    hooks = [table.register_forward_pre_hook(note) for table in tables]
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    token = torch.full((1, 1), int(padding == 0), device=model.device)
    more: tuple[dict[str, Any], ...] = ({}, {"position_ids": torch.zeros_like(token)})
    try:
        for given in more:
            found.append([])
            model(input_ids=token, use_cache=False, **given)
    except TypeError:  # it takes no positions
        return 0
    finally:
        for hook in hooks:
            hook.remove()
    own, zero = found
    return max((int(a.max() - b.max()) for a, b in zip(own, zero, strict=True)), default=0)
