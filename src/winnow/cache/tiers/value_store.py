"""Memory for values beside the device: on the host, or in a file."""

import contextlib
import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from winnow.cache.memory import empty_in_large_pages
from winnow.cache.row_groups import BlockKind
from winnow.errors import ConfigError, describe_error
from winnow.process.resources import host_memory
from winnow.values.tier_traffic import TierTraffic
from winnow.values.units import format_bytes
from winnow.values.value_tier import ValueTier

_EXTENT_BYTES = 2**24


class ValueStore:
    """The values of blocks that lie on a tier.

    Raises ConfigError: the tier has not the memory, or the directory cannot be written.

    Attributes:
        data: uint8 [num_blocks, `BlockKind.tier_bytes`]: pinned where the pool lies on a CUDA device, else ordinary
            memory or that of a file.
    """

    def __init__(self, kind: BlockKind, num_blocks: int, device: torch.device | str) -> None:
        assert kind.tier is not None, "there is a tier"
        self.tier: ValueTier = kind.tier
        self.slot_bytes, self._block_bytes = kind.tier_slot_bytes, kind.tier_bytes
        self.traffic = TierTraffic()
        self._file: int | None = None
        shape, nbytes = (num_blocks, kind.tier_bytes), num_blocks * kind.tier_bytes
        if self.tier.path is not None:
            self.data = self._map(self.tier.path, max(nbytes, 1)).narrow(0, 0, nbytes).view(shape)
            return
        _require_host_memory(nbytes)
        if torch.device(device).type == "cuda":
            self.data = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        else:
            self.data = empty_in_large_pages(shape, torch.uint8)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def take_traffic(self) -> TierTraffic:
        taken, self.traffic = self.traffic, TierTraffic()
        return taken

    def grant(self, blocks: range) -> tuple[int, str | None]:
        """Make sure that blocks can be written, the last ones first, so that a lack is found before it is touched.
        Returns from which of them on that holds, and why not of all; None: it does."""
        step, end = max(_EXTENT_BYTES // self._block_bytes, 1), blocks.stop
        while end > blocks.start:
            first = max(end - step, 0)
            try:
                self._grant(first, end)
            except (MemoryError, OSError) as error:
                return end, describe_error(error)
            end = first
        return end, None

    def _grant(self, first: int, end: int) -> None:
        start, nbytes = first * self._block_bytes, (end - first) * self._block_bytes
        if self._file is not None:
            # A hole of a mapped file that finds no room on the disk when it is written would end the process.
            os.posix_fallocate(self._file, start, nbytes)
            return
        memory = None if self.data.is_pinned() else host_memory()
        if memory is not None and memory.free < nbytes:
            raise MemoryError(
                f"{format_bytes(nbytes)} of host memory asked for, {format_bytes(memory.free)} free"
            )

    def _map(self, directory: Path, nbytes: int) -> Tensor:
        """Return a file of holes that has no name, so that it goes with the process."""
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


def _require_host_memory(nbytes: int) -> None:
    memory = host_memory()
    if memory is not None and nbytes > memory.free:
        raise ConfigError(
            f"value_tier: size must be at most the host's free memory, {format_bytes(memory.free)}, got "
            f"{format_bytes(nbytes)}: give size=..., or less kv_memory"
        )
