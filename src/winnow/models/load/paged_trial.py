"""A few tokens through a model over a small paged cache, to be compared with what they should give. No transformers."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from winnow.attention import (
    AttentionBackend,
    AttentionSpec,
    PagedCache,
    ReferenceBackend,
    Spans,
    open_backend,
)
from winnow.cache import CacheLayout, CacheSize, LocalCache
from winnow.cache.codec import PlainCodec
from winnow.cache.recurrent import Computed
from winnow.errors import UnsupportedModelError
from winnow.models.load.loaded import LoadedModel
from winnow.values.kv_dtype import WideParts

HALF = 0.2
"""Largest difference of logits, as a part of their norm, where numbers have fewer bits than float32: results differ by
rounding, and in models with experts a token may go elsewhere for it, so that the median over tokens counts."""
_BLOCK_SIZE = 16
_TOKENS = 40


class _Step:
    """One forward pass over a small paged cache; see `winnow.models.bind.binding.AttentionStep`."""

    logits_indices = None

    def __init__(self, backend: AttentionBackend, cache: PagedCache, spans: Spans) -> None:
        self._step = backend.prepare(cache, spans)
        self.native = self._step.whole_layers
        self.rotate_and_write = self._step.rotate_and_write

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self._step.write(layer, k, v)
        return self._step.attend(layer, q, spec)

    def attend_written(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return self._step.attend(layer, q, spec)


@torch.inference_mode()
def verify_codec(loaded: LoadedModel, layout: CacheLayout, attention_backend: str) -> None:
    """Compare a backend over KVs stored as a layout says with plain torch over the same: they change logits by design.
    Raises UnsupportedModelError: the logits differ; names the format, and by how much."""
    if all(isinstance(codec, PlainCodec) for codec in layout.codecs):
        return
    groups = tuple(replace(group, window=None, tier=None) for group in layout.groups)
    layout = replace(layout, groups=groups, chunk=None, wide=WideParts())
    length = min(_TOKENS, loaded.trained_len)
    tokens = random_tokens(loaded.vocab_size, length, loaded.device)
    backend = open_backend(attention_backend, loaded.device)
    found, expected = (paged_logits(loaded, tokens, each, layout) for each in (backend, ReferenceBackend()))
    differences = differences_of(found, expected)
    if len(differences) and not float(differences.median()) <= HALF:
        raise UnsupportedModelError(
            f"kv_cache_dtype: {type(backend).__name__} computes something else of KVs stored as {layout.codec_names} "
            f"than plain torch (logits differ by {float(differences.median()):.2g} of their norm, {HALF:g} is allowed)"
        )


def random_tokens(vocab_size: int, length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (length,), generator=generator, device="cpu").to(device)


def plain_layout(loaded: LoadedModel) -> CacheLayout:
    geometry = loaded.geometry
    sizes = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, _BLOCK_SIZE
    shapes = [shape[1:] for shape in geometry.by_layer]
    return CacheLayout.even(*sizes, loaded.dtype, 1, shapes=shapes, values_in_keys=geometry.latent)


def differences_of(found: Tensor, expected: Tensor) -> Tensor:
    """Return differences of tokens' logits, [T, V], as parts of their norms. Tokens whose expected logits are no
    numbers (float16 overflows) are left out."""
    # What a bias rules out is minus infinity in both.
    away = torch.where(found == expected, 0.0, found - expected).norm(dim=-1)
    differences = away / expected.where(expected.isfinite(), 0.0).norm(dim=-1)
    return differences[(expected < float("inf")).all(dim=-1)]


def paged_logits(
    loaded: LoadedModel, tokens: Tensor, backend: AttentionBackend, layout: CacheLayout
) -> Tensor:
    """Return logits of each token, float32 [T, V]: all but the last in a chunk or two, and the last by itself."""
    length = len(tokens)
    size = CacheSize.of_blocks(layout, layout.blocks_for(length), 1, length)
    cache = LocalCache(layout, size, loaded.device)
    slot, states = cache.ledger.open(), loaded.open_states(1)
    rows = []
    # A chunk, where there are states one that continues the first, and a token by itself.
    for start, end in pairwise(sorted({0, length // 2 if states else 0, length - 1, length})):
        cache.append([slot], [end - start])
        lengths = cache.paged.tables.longest([slot])
        spans = Spans.build([slot], [start], [end - start], lengths, loaded.device)
        if states is not None:
            states.begin([Computed(slot, start, end)])
        wanted = torch.arange(end - start, device=loaded.device)
        step = _Step(backend, cache.paged, spans)
        rows.append(loaded.compute(tokens[start:end], spans, wanted, step, states).float())
    return torch.cat(rows)
