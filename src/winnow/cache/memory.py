"""Memory: checks that it is available, and allocation for scattered reads."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from winnow.errors import ConfigError
from winnow.process.resources import HostMemory, host_memory
from winnow.values.units import format_bytes

_LARGE_PAGE = 2 * 2**20


def empty_in_large_pages(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Allocate an uninitialised tensor; on a CPU under Linux, in large pages if the kernel grants them.

    The blocks of a row lie anywhere in the pool, each on another page. With small pages, address translation would
    cost as much as reading. The system provides pages when they are first touched.
    """
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or nbytes < _LARGE_PAGE:
        return torch.empty(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(
        -1, -(-nbytes // _LARGE_PAGE) * _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with contextlib.suppress(OSError):  # kernels without large pages use small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive.
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)


def require_memory(kv_memory: int, needed: int, device: torch.device | str) -> None:
    """Raise ConfigError if the device lacks the KV memory, before it is touched: Linux kills who overcommits.

    The cache will use `needed` of the bytes that the user asked for.
    """
    memory = _device_memory(torch.device(device))
    if memory is None or (kv_memory <= memory.limit and needed <= memory.free):
        return
    raise ConfigError(
        f"kv_memory must fit the memory of {device}, of which this process may have {format_bytes(memory.limit)} and "
        f"{format_bytes(memory.free)} is free now, got {format_bytes(kv_memory)}"
        + (f", of which {format_bytes(needed)} would be used" if needed != kv_memory else "")
    )


def require_host_memory(kv_offloading_size: int, device: torch.device | str, kv_memory: int) -> None:
    """Raise ConfigError if the machine lacks the memory of the host tier; on a CPU it comes on top of the KV memory."""
    memory = host_memory()
    if memory is None:
        return
    beside = kv_memory if torch.device(device).type == "cpu" else 0
    if kv_offloading_size + beside > memory.limit:
        raise ConfigError(
            f"kv_offloading_size must fit the host's memory, of which this process may have "
            f"{format_bytes(memory.limit)}, got {format_bytes(kv_offloading_size)}"
            + (f" beside {format_bytes(beside)} of kv_memory" if beside else "")
        )


def _device_memory(device: torch.device) -> HostMemory | None:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return HostMemory(total, free)
    return host_memory() if device.type == "cpu" else None
