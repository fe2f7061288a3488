"""Durations of calls, with rivals measured in turn."""

import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def seconds_of(call: Call, device: torch.device) -> float:
    """Return seconds that `call` takes, its work on the device included."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):  # events are recorded on the current device's stream
            torch.cuda.synchronize()
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(calls: Sequence[Call], repeats: int, device: torch.device) -> list[list[float]]:
    """Return seconds of each call, `repeats` times each: [calls][repeats].

    All warm up once. Then every round times each call once, in turn: a machine that slows down, slows all of them.
    """
    for call in calls:
        call()
    rounds = [[seconds_of(call, device) for call in calls] for _ in range(repeats)]
    return [list(column) for column in zip(*rounds, strict=True)]
