"""Gives memory back to the system that loading a model leaves behind."""

import ctypes
import mmap
import sys
from collections.abc import Iterable

from torch import Tensor

_MADV_PAGEOUT = 21


def release_pages(tensors: Iterable[Tensor]) -> None:
    """Let go of the pages behind tensors that nobody will read again but whose memory others keep mapped.

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
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT)


def is_file_backed(tensor: Tensor) -> bool:
    """Whether a tensor is a view of a mapped file, as weights are that were read in the format they are stored in."""
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
    """Return what the C library's allocator holds free (glibc)."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))
