"""Threads of the CPU kernels and of torch: how many, and how they wait for each other (`native/team_wait.h`)."""

import os
from typing import Self

import torch

from winnow.process import native
from winnow.process.resources import available_cpus

# Variables by which users say themselves how many threads compute, and how they wait.
_NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def set_threads(threads: int | None, processes: int = 1) -> None:
    """Let torch and the kernels compute with `threads` threads.

    None: torch's own number, but no more than cores that affinity and control groups allow, without hyperthreads; where
    the user has said otherwise in OpenMP's variables, that number. Of several processes each gets its part.
    """
    if threads is None:
        if _is_set(_NUMBER):
            return
        threads = max(min(torch.get_num_threads(), available_cpus()) // processes, 1)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


class TeamWait:
    """Waiting of OpenMP's threads: briefly while this process shares its processors, and as they like otherwise. Of all
    threads of the process; nothing where the kernels are not installed, or a variable says how to wait."""

    def __init__(self) -> None:
        self._watch = native.TeamWait() if native.is_installed() and not _is_set(_WAITING) else None

    @property
    def is_short(self) -> bool:
        return self._watch is not None and bool(self._watch.is_short)

    def stop(self) -> None:
        """Leave the runtime's default in force."""
        if self._watch is not None:
            self._watch.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def release_team() -> None:
    """End the OpenMP threads that wait for the calling thread, so that another one computes at full speed.

    libgomp keeps a team for every thread that has computed in parallel, and lets all of them wait briefly once they
    outnumber the processors: a decode step of 0.3 ms takes 2 ms. The next parallel region starts a team anew (0.1 ms).
    """
    if native.is_installed():
        native.release_team()


def _is_set(variables: tuple[str, ...]) -> bool:
    return any(os.environ.get(name) for name in variables)
