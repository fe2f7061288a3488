"""Arguments that launches share: the device, the layout of the cache, and the dtype of products."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.cache import PagedCache
from winnow.cache.codec import PairCodec
from winnow.cache.formats import PlainFormat
from winnow.cache.layout import PAGE_ENTRIES, ceil_div

_FORMATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Smallest dimension of a matrix product.
_LEAST_TILE = 16


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, slowly: TRITON_INTERPRET=1 when they were imported."""
    return bool(triton.knobs.runtime.interpret)


def device_refusal(device: torch.device) -> str | None:
    """Return why kernels cannot run on `device`; None: it is a GPU, or a CPU with the interpreter."""
    if device.type == "cuda" or (device.type == "cpu" and interpreted()):
        return None
    return (
        f"needs a GPU, got device {device.type}; on cpu its kernels run only for tests, very slowly, with "
        "TRITON_INTERPRET=1 in the environment"
    )


def capability_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@dataclass(frozen=True)
class CacheShape:
    """Shape of the cache, a constant with which kernels are compiled."""

    layers: int
    kv_heads: int
    block_size: int
    pages_per_seq: int
    page_entries: int = PAGE_ENTRIES

    @classmethod
    def of(cls, cache: PagedCache) -> "CacheShape":
        layout = cache.pool.layout
        return cls(layout.num_layers, layout.num_kv_heads, layout.block_size, cache.tables.pages_per_seq)


def product_dtype(q: Tensor, codec: PairCodec) -> torch.dtype:
    """Return the dtype of products: it holds activations and plain vectors exactly, and decoded ones are rounded."""
    dtype = q.dtype
    for form in (codec.key, codec.value):
        if isinstance(form, PlainFormat):
            dtype = torch.promote_types(dtype, getattr(torch, form.dtype))
    return dtype


def dot_format(dtype: torch.dtype) -> Any:
    return tl.float32 if interpreted() else _FORMATS[dtype]


def padded(size: int) -> int:
    return max(_LEAST_TILE, int(triton.next_power_of_2(size)))


def unit_stride(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension, copied if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True)
class Launch:
    """Launch parameters of one kernel; a tile is `queries` x `keys`."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of the kernels over rows for one cache layout.

    Attributes:
        decode: `queries` is the minimum of rows in a tile, to which a group of query heads is padded.
        chunk: `queries` is the number of rows in a tile: tokens times query heads of a group.
        observe: `queries` is a number of tokens.
        min_split: minimum of KVs that one program takes of a decoding row where rows are many; a multiple of
            `decode.keys`.
        max_splits: maximum of programs for one row, which bounds the scratch for partial results.
    """

    decode: Launch
    chunk: Launch
    observe: Launch
    min_split: int = 1024
    max_splits: int = 64

    def split_of(self, rows: int, longest: int, multiprocessors: int) -> int:
        """Return the minimum of KVs in a split: `min_split`, halved until programs would fill a GPU twice."""
        split = self.min_split
        while split > _LEAST_SPLIT and rows * ceil_div(longest, split) < 2 * multiprocessors:
            split //= 2
        return split


# Merging costs more than what shorter splits gain.
_LEAST_SPLIT = 256

# By bytes of a padded key, from a sweep on an H100 at 256 bytes: 64 rows of 4,096 KVs, and chunks of 512 queries at
# their end. Decoding, few stages of large tiles win, since three programs of a multiprocessor hide each other's loads:
# the tiles of K and V of three have to fit into its shared memory.
_DECODE_HOPPER = {128: Launch(16, 128, 4, 2), 256: Launch(16, 128, 4, 2), 512: Launch(16, 64, 4, 2)}
# The same for 99 KiB (compute capability 8.6 and 8.9) and 163 KiB (8.0) instead of 227.
_DECODE_AMPERE = {128: Launch(16, 128, 4, 2), 256: Launch(16, 64, 4, 2), 512: Launch(16, 32, 4, 2)}
# Chunks: sums that fit into registers. At 256 bytes 128 x 64 in 8 warps takes 529 instructions for a thread's 32 logits
# and spills with no window, soft-cap or format; the sweep's 128 x 32 in 4 warps takes 620 and spills.
_CHUNK_HOPPER = {128: Launch(128, 64, 8, 3), 256: Launch(128, 64, 8, 3), 512: Launch(128, 32, 8, 2)}
_CHUNK_AMPERE = {**_CHUNK_HOPPER, 512: Launch(64, 32, 4, 2)}
_OBSERVE = {128: Launch(64, 64, 4, 2), 256: Launch(64, 64, 4, 2), 512: Launch(32, 64, 4, 2)}
# Latents of 576, padded to 1,024: a tile of queries, of keys and of values each fill shared memory.
_LATENTS = Tuning(Launch(16, 32, 8, 2), Launch(16, 32, 8, 1), Launch(16, 32, 8, 1))
# float32 is multiplied in registers, without tensor cores: smaller tiles.
_FULL = {
    256: Tuning(Launch(16, 32, 4, 2), Launch(32, 32, 4, 2), Launch(16, 32, 4, 1)),
    512: Tuning(Launch(16, 32, 4, 2), Launch(32, 32, 4, 1), Launch(16, 32, 4, 1)),
    1024: Tuning(Launch(16, 16, 4, 1), Launch(16, 32, 4, 1), Launch(16, 16, 4, 1)),
}


def tuning_for(head_dim: int, dtype: torch.dtype, capability: int) -> Tuning:
    """Return launch parameters for rows of a padded `head_dim`; sizes beyond the table take its nearest entry.

    `dtype` is that of products, `capability` the GPU's, as 90.
    """
    row_bytes = head_dim * dtype.itemsize
    if dtype is torch.float32:
        return _FULL[min(max(256, row_bytes), 1024)]
    if row_bytes > 1024:
        return _LATENTS
    size = min(max(128, row_bytes), 512)
    # 12.x has as little shared memory as 8.6; and wider rows want smaller tiles.
    if 90 <= capability < 120 and row_bytes <= 512:
        return Tuning(_DECODE_HOPPER[size], _CHUNK_HOPPER[size], _OBSERVE[size])
    return Tuning(_DECODE_AMPERE[size], _CHUNK_AMPERE[size], _OBSERVE[size])
