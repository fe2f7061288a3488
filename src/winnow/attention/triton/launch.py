"""Arguments that launches share: the device, the layout of the cache, and the dtype of products."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.cache import PagedCache
from winnow.cache.codec import PairCodec
from winnow.cache.formats import PlainFormat
from winnow.cache.layout import PAGE_ENTRIES

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
    """Return the compute capability of a GPU, as 90; the interpreter passes for the least that is supported."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors_of(device: torch.device) -> int:
    """Return multiprocessors of a GPU; the interpreter passes for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def cache_layout(cache: PagedCache) -> dict[str, Any]:
    """Return the compile-time constants of kernels that describe the cache."""
    layout = cache.pool.layout
    return {
        "LAYERS": layout.num_layers,
        "KV_HEADS": layout.num_kv_heads,
        "BLOCK_SIZE": layout.block_size,
        "PAGE_ENTRIES": PAGE_ENTRIES,
        "PAGES_PER_SEQ": cache.tables.pages_per_seq,
    }


def product_dtype(q: Tensor, codec: PairCodec) -> torch.dtype:
    """Return the dtype in which q, K, p and V are multiplied: one that holds the activations and plain vectors exactly.

    Decoded vectors are rounded to it.
    """
    dtype = q.dtype
    for form in (codec.key, codec.value):
        if isinstance(form, PlainFormat):
            dtype = torch.promote_types(dtype, getattr(torch, form.dtype))
    return dtype


def dot_format(dtype: torch.dtype) -> Any:
    """Return Triton's name for the dtype of products. The interpreter has no bfloat16 arithmetic."""
    return tl.float32 if interpreted() else _FORMATS[dtype]


def padded(size: int) -> int:
    """Round `size` up to the extent of a tile."""
    return max(_LEAST_TILE, int(triton.next_power_of_2(size)))


def unit_stride(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension, copied if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()
