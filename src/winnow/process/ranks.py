"""The ranks of a model that several processes compute together, and how they exchange tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

_TIMEOUT = timedelta(minutes=10)
"""Longest wait for ranks that live. One that has died is known at once: its connections close."""


@dataclass(frozen=True)
class Ranks:
    """One of `size` ranks, as it sees all of them. One alone exchanges nothing. All ranks call the same methods in the
    same order with tensors of the same shapes."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    _group: Any = field(default=None, repr=False)

    @classmethod
    def connect(cls, rank: int, size: int, directory: Path, device: torch.device) -> Self:
        """Open connections to the others, on a CPU by the loopback device. Waits for all of them. They meet by a file
        in a directory that only this user reads. Nothing global is set up: several groups can exist."""
        import torch.distributed as dist

        store = dist.FileStore(str(directory / "ranks"), size)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            return cls(rank, size, str(device), dist.ProcessGroupNCCL(store, rank, size, options))
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # stubs lack it
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        return cls(rank, size, str(device), dist.ProcessGroupGloo(store, rank, size, options))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part(self, total: int) -> slice:
        """Return which of `total` things, as even as can be, are this rank's."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def own(self, x: Tensor, dim: int) -> Tensor:
        part = self.part(x.shape[dim])
        return x.narrow(dim, part.start, part.stop - part.start)

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, the same bits on each; `x` may be overwritten."""
        if self.size > 1:
            x = x.contiguous()
            self._group.allreduce([x]).wait()
        return x

    def join(self, x: Tensor, dim: int, total: int | None = None) -> Tensor:
        """Concatenate parts of the ranks along `dim`, in their order: those of `total` by `part`; None: all alike."""
        if self.size == 1:
            return x
        if x.dtype == torch.bool:
            return self.join(x.to(torch.uint8), dim, total).bool()
        size = x.shape[dim] if total is None else -(-total // self.size)
        x = x.transpose(0, dim)
        sent = x.new_zeros((size, *x.shape[1:]))
        sent[: len(x)] = x
        found = [torch.empty_like(sent) for _ in range(self.size)]
        self._group.allgather([found], [sent]).wait()
        if total is not None:
            parts = (Ranks(rank, self.size).part(total) for rank in range(self.size))
            found = [each[: part.stop - part.start] for each, part in zip(found, parts, strict=True)]
        return torch.cat(found).transpose(0, dim)

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number over the ranks."""
        if self.size == 1:
            return list(numbers)
        return self.join(torch.tensor([list(numbers)], device=self.device), 0).amax(dim=0).tolist()


ALONE = Ranks()
