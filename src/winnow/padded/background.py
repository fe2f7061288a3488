"""A prefill beside the running batch: in a thread of its own, and on CUDA in a stream of its own."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event

import torch

from winnow.engine.request import Sequence
from winnow.padded.prefill import Prefilled

Compute = Callable[[Callable[[], bool]], Prefilled]
"""Prefills a group. Its argument says, whenever asked, whether to give up."""


class Background:
    """Prefills groups, each in a thread that ends with it.

    A thread that stayed would keep a team of OpenMP threads of its own, and where there are more of these than cores,
    the batch's passes are slower even while nothing is prefilled.

    Args:
        device: of the model.
        clock: seconds, monotonic.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, sequences: list[Sequence], compute: Compute) -> "Underway":
        """Begin to prefill a group."""
        if self._stream is not None:
            # What the caller's stream still does comes first: weights may be on their way.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        stop = Event()
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="winnow-prefill")
        future = pool.submit(_run, compute, stop, self._stream, self._clock)
        pool.shutdown(wait=False)  # takes no more work, and ends when this is done
        return Underway(sequences, future, stop, self._stream)


class Underway:
    """A group that is being prefilled. Let go, it gives up at its next forward pass.

    Attributes:
        sequences: the group. Nobody else may change them meanwhile, except to abort them.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        future: "Future[tuple[Prefilled, float]]",
        stop: Event,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.sequences = sequences
        self._future = future
        self._stop = stop
        self._stream = stream
        weakref.finalize(self, stop.set)

    @property
    def done(self) -> bool:
        """Whether it is computed, on the device too, or has failed."""
        return self._future.done()

    def wait(self) -> None:
        """Return as soon as it is done."""
        wait([self._future])

    def cancel(self) -> None:
        """Give up, which takes one forward pass at most. Then its memory is free."""
        self._stop.set()
        self.wait()

    @property
    def failure(self) -> BaseException | None:
        """Once it is done: what it failed with."""
        return self._future.exception()

    def result(self) -> tuple[Prefilled, float]:
        """Once it is done without failure: the group, for the caller's stream, and the seconds it took."""
        group, seconds = self._future.result()
        if self._stream is not None:
            here = torch.cuda.current_stream(self._stream.device)
            here.wait_stream(self._stream)
            # They were allocated in the other stream, which must not reuse them before this one has read them.
            for tensor in group.tensors:
                tensor.record_stream(here)
        return group, seconds


def _run(
    compute: Compute, stop: Event, stream: torch.cuda.Stream | None, clock: Callable[[], float]
) -> tuple[Prefilled, float]:
    """In the thread. Modes of torch and its current stream are each thread's own."""
    start = clock()
    with torch.inference_mode(), torch.cuda.stream(stream):
        group = compute(stop.is_set)
        if stream is not None:  # else the batch would stand still behind kernels that are merely queued
            stream.synchronize()
    return group, clock() - start
