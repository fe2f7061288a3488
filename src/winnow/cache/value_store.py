"""Memory for values beside the device: on the host, or in a file."""

import contextlib
import errno
import mmap
import os
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from winnow.cache.layout import CacheLayout, IntArray, ceil_div
from winnow.cache.memory import empty_in_large_pages
from winnow.errors import ConfigError
from winnow.resources import host_memory
from winnow.units import format_bytes
from winnow.value_tier import ValueTier

# Memory is asked for in pieces of this size, so that a lack is found before it is touched.
_EXTENT_BYTES = 2**24


@dataclass
class TierTraffic:
    """What went to and from a value tier.

    Attributes:
        head_queries: pairs of a decoded token and a query head that chose which values to read; rows_selected: values
            that these chose, at most N each.
        rows_read: values read for them; those that several query heads of a group chose count once.
        rows_prefilled: values read by tokens of prompts, which read all.
        rows_written: values stored.
        bytes_read, bytes_written: of all these.
        seconds_waited: for values to arrive; on a CPU, which reads them where they lie, none.
    """

    head_queries: int = 0
    rows_selected: int = 0
    rows_read: int = 0
    rows_prefilled: int = 0
    rows_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds_waited: float = 0.0

    def add(self, other: "TierTraffic") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class ValueStore:
    """The values of blocks that lie on a tier.

    Attributes:
        data: uint8 [num_blocks, bytes of a block's values]: pinned where the pool lies on a CUDA device, else ordinary
            memory or that of a file.
        traffic: what went to and from it.

    Raises:
        ConfigError: the tier has not the memory, or the directory cannot be written.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, device: torch.device | str) -> None:
        assert layout.value_tier is not None, "there is a tier"
        self.tier: ValueTier = layout.value_tier
        self.slot_bytes = sum(field.slot_bytes for field in layout.codec.value_fields(layout.head_dim))
        self._block_bytes = layout.value_bytes
        self.traffic = TierTraffic()
        self._file: int | None = None
        shape = (num_blocks, layout.value_bytes)
        nbytes = num_blocks * layout.value_bytes
        self._committed = np.zeros(ceil_div(nbytes, _EXTENT_BYTES), dtype=np.bool_)
        if self.tier.path is not None:
            self.data = self._map(self.tier.path, max(nbytes, 1)).narrow(0, 0, nbytes).view(shape)
        elif torch.device(device).type == "cuda":
            _require_host_memory(nbytes)
            self.data = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
            self._committed[:] = True
        else:
            _require_host_memory(nbytes)
            self.data = empty_in_large_pages(shape, torch.uint8)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def commit(self, blocks: IntArray) -> None:
        """Make sure that blocks, counted from the store's first, int32 [n], can be written.

        Raises:
            MemoryError, OSError: the host or the disk is full; nothing was written.
        """
        first = blocks.astype(np.int64) * self._block_bytes
        last = first + self._block_bytes - 1
        extents = np.unique(np.concatenate([first // _EXTENT_BYTES, last // _EXTENT_BYTES]))
        for extent in extents[~self._committed[extents]].tolist():
            self._take(extent * _EXTENT_BYTES, min(_EXTENT_BYTES, self.nbytes - extent * _EXTENT_BYTES))
            self._committed[extent] = True

    def _take(self, start: int, nbytes: int) -> None:
        if self._file is not None:
            # A hole of a mapped file that finds no room on the disk when it is written would end the process.
            os.posix_fallocate(self._file, start, nbytes)
            return
        memory = host_memory()
        if memory is not None and memory.free < nbytes:
            raise MemoryError(
                f"{format_bytes(nbytes)} of host memory asked for, {format_bytes(memory.free)} free"
            )

    def _map(self, directory: Path, nbytes: int) -> Tensor:
        """A file of holes that has no name, so that it goes with the process."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file, name = tempfile.mkstemp(prefix="winnow-values-", dir=directory)
            os.unlink(name)
            os.ftruncate(self._file, nbytes)
            memory = mmap.mmap(self._file, nbytes)
        except OSError as error:
            raise ConfigError(
                f"value_tier: {directory} must hold a file of {format_bytes(nbytes)}: {error.strerror}"
            ) from None
        with contextlib.suppress(OSError, AttributeError):  # rows are read here and there
            memory.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]
            self._file = None


def is_out_of_space(error: OSError) -> bool:
    """Whether a disk, or the part of it that a user may take, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _require_host_memory(nbytes: int) -> None:
    memory = host_memory()
    if memory is not None and nbytes > memory.free:
        raise ConfigError(
            f"value_tier: size must be at most the host's free memory, {format_bytes(memory.free)}, got "
            f"{format_bytes(nbytes)}: give size=..., or less kv_memory"
        )
