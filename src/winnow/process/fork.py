"""Effects of a fork of the process on torch: the child inherits its state without the threads that belong to it.

GNU's OpenMP, which computes for torch and for the kernels, keeps a team of threads for each thread that has used it. A
child that inherits the books of such a team waits for it forever, at its first parallel loop. So a thread lets its team
go before it forks, though not for `subprocess`; parent and child start new ones when they need them.
"""

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from winnow.errors import ForkedError

_SOFT = 1  # omp_pause_soft: threads end, settings stay

# The process that imported torch, or at least no later one.
_IMPORTED_BY = os.getpid()


_PAUSE: Callable[[int], int] | None = None
with suppress(AttributeError, OSError):  # the OpenMP that torch uses has none: GCC before 9
    _PAUSE = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all


def require_usable_torch(device: str) -> None:
    """Raise ForkedError if this process was forked from one whose state of torch it can neither use nor replace."""
    if torch.cuda._is_in_bad_fork() and not device.startswith("cpu"):
        raise ForkedError(
            f"device={device} cannot be used in this process: it was forked from one that had begun to use CUDA. Start "
            "it with multiprocessing's spawn method, or open the LLM with device=cpu"
        )
    if _PAUSE is None and os.getpid() != _IMPORTED_BY:
        raise ForkedError(
            "an LLM cannot be created in a forked process here: the OpenMP of this installation of torch may wait for "
            "threads of the parent forever. Start the process with multiprocessing's spawn method"
        )


if _PAUSE is not None and hasattr(os, "register_at_fork"):
    os.register_at_fork(before=partial(_PAUSE, _SOFT))
