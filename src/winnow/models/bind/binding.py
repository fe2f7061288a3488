"""Binding of transformers' attention layers to Winnow's cache.

transformers lets a model take its attention from a registered function. Ours keeps no state: the step that is being
computed travels as a keyword argument of the model's own forward, down to each attention layer.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from winnow.attention import AttentionSpec
from winnow.errors import UnsupportedModelError
from winnow.models.bind.latent import LatentHeads
from winnow.models.load.kinds import takes_attention

ATTENTION_NAME = "winnow"
# What classes with attention of their own are told: it has masks, which some cannot do without.
_OWN = "winnow_own"
# Keyword arguments that transformers hands to every attention function and that change nothing here: there is no
# dropout in inference, no cache of transformers' own, and masks follow from positions.
_HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def cache_argument(model: nn.Module) -> str:
    """Return what a model's forward calls its cache: transformers renamed it within its fifth version."""
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
    parts = {
        key: name for key in config.sub_configs if getattr(config, key, None) is config.get_text_config()
    }
    return {"": name, **parts} if parts else name


class CausalModel(Protocol):
    """Interface of a model for a forward pass: transformers' class bound to `paged_attention`, or a `PackedDecoder`."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and hidden states."""

    @property
    def device(self) -> torch.device:
        """Device on which the model computes."""

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Return the buffers by name, as of `nn.Module`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the forward pass; its result has `logits`."""


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
        """Begin another pass, as a hook."""
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
    """Return the function that transformers calls: query [1, Hq, T, d], key and value [1, H, T, d] -> [1, T, Hq, d].

    Modules have a number in the cache, `kv_layer`, or several, from `probe_geometry`. Keys come rotated. No mask is
    ever built for this function; what a mask would say follows from positions.

    Raises:
        UnsupportedModelError: the layer asks for something that attention here does not compute.
    """
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _HARMLESS]
    if unknown or attention_mask is not None:
        asked = ", ".join(unknown) or "a mask of its own"
        raise UnsupportedModelError(
            f"{type(module).__name__} asks attention for {asked}, which Winnow does not compute"
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(
            f"{type(module).__name__} is not causal; Winnow computes causal attention only"
        )
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


def _no_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *_: Any,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **__: Any,
) -> Tensor:
    """Return one number for all logits, [B, 1, T, keys]: what a mask would say follows from positions."""
    return torch.zeros((), dtype=dtype, device=device).expand(batch_size, 1, q_length, kv_length)


AttentionMaskInterface.register(_OWN, _no_mask)
