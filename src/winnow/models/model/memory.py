"""Memory that a model's weights take, and its return to the system that loading leaves behind."""

import ctypes
import mmap
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

_MADV_DONTNEED, _MADV_PAGEOUT = 4, 21
# A page's entry in pagemap: 8 bytes, and what their highest bits say.
_ENTRY = 8
_OF_FILE, _HELD = np.uint64(1 << 61), np.uint64(3 << 62)


def weight_bytes(model: Module) -> int:
    held: list[Any] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        for value in (module, *vars(module).values()):
            held += [getattr(value, name, None) for name in ("packed", "_packed", "scale")]
    tensors = [each for each in held if isinstance(each, Tensor) and not each.is_meta]
    places = {id(each) if each.is_mkldnn else each.data_ptr(): each for each in tensors}
    return sum(each.numel() * each.element_size() for each in places.values())


def stored_kind(model: Module) -> str | None:
    """Return llama.cpp's name of the blocks that most bytes of packed weights are in; None: there are none."""
    held: Counter[str] = Counter()
    for packed in (getattr(module, "packed", None) for module in model.modules()):
        for kind in getattr(packed, "kinds", ()):
            held[kind] += packed.packed.nbytes  # type: ignore[union-attr]
    return max(held, key=held.__getitem__) if held else None


def release_pages(tensors: Iterable[Tensor]) -> None:
    """Let go of the pages behind tensors that are not read again but whose memory others keep mapped.

    Weights read from safetensors are views of one mapped file, which stays mapped, and its pages resident, as long as
    any of them lives. Nothing is lost: pages that are read after all come back from the file. Only Linux is asked.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    page = mmap.PAGESIZE
    for tensor in tensors:
        start = -(-tensor.data_ptr() // page) * page
        end = (tensor.data_ptr() + tensor.nbytes) // page * page
        if end > start:
            # Paging out keeps what is written nowhere else, but also all that other processes have mapped too.
            advice = _MADV_PAGEOUT if _has_own_pages(start, end) else _MADV_DONTNEED
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def _has_own_pages(start: int, end: int) -> bool:
    """Return whether some pages between two addresses hold what no file does; True where Linux does not tell."""
    num_bytes = (end - start) // mmap.PAGESIZE * _ENTRY
    try:
        with Path("/proc/self/pagemap").open("rb") as pagemap:
            pagemap.seek(start // mmap.PAGESIZE * _ENTRY)
            data = pagemap.read(num_bytes)
    except OSError:
        return True
    entries = np.frombuffer(data, dtype=np.uint64)
    own = (entries & _HELD != 0) & (entries & _OF_FILE == 0)
    return len(data) < num_bytes or bool(own.any())


def is_file_backed(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of a mapped file, as weights are that are stored in their format."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            for line in maps:
                addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
                start, end = (int(address, 16) for address in addresses.split("-"))
                if start <= tensor.data_ptr() < end:
                    return inode != "0"
    except OSError:  # no Linux
        pass
    return False


def trim_heap() -> None:
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))


def release_cached(device: torch.device) -> None:
    """Give a GPU back what torch keeps of freed memory; nothing on other devices."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
