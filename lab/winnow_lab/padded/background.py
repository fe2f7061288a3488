"""Prefill beside the running batch, in a thread and, on CUDA, a stream of its own; and copies of parked KVs."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event

import torch

from winnow.engine.requests.request import Sequence
from winnow_lab.padded.cache import QueryKVs
from winnow_lab.padded.prefill import Prefilled

Compute = Callable[[Callable[[], bool]], Prefilled]
"""Prefills a group; calls its argument between forward passes and stops if that returns True."""


class Background:
    """Background prefills of groups, each in a thread of its own that ends with the prefill.

    A permanent thread would keep its own team of OpenMP threads, and with more of those than cores the passes of the
    batch are slower even while nothing is prefilled.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, sequences: list[Sequence], compute: Compute) -> "Underway":
        if self._stream is not None:
            # Work queued on the caller's stream comes first: weights may still be copied.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        stop = Event()
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="winnow-prefill")
        future = pool.submit(_run, compute, stop, self._stream, self._clock)
        pool.shutdown(wait=False)  # the thread ends after this task
        return Underway(sequences, future, stop, self._stream)


class StreamFetch:
    """Copies of parked KVs from host memory to a CUDA device, in a stream beside the batch's passes (BATON 4.2)."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def __call__(self, kvs: QueryKVs) -> Callable[[], QueryKVs]:
        """Start a copy. Returns what gives it, ready for the caller's stream."""
        with torch.cuda.stream(self._stream):
            copy = kvs.map(lambda tensor: tensor.to(self._stream.device, non_blocking=True, copy=True))

        def arrive() -> QueryKVs:
            here = torch.cuda.current_stream(self._stream.device)
            here.wait_stream(self._stream)
            for layer in copy.layers:
                for tensor in layer:  # as in `Underway.result`
                    tensor.record_stream(here)
            return copy

        return arrive


class Underway:
    """A group that is being prefilled. When garbage-collected, it stops before its next forward pass.

    Attributes:
        sequences: the group; they must not be changed meanwhile, except to abort them.
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
        """Whether it is computed, including on the device, or has failed."""
        return self._future.done()

    def wait(self) -> None:
        wait([self._future])

    def cancel(self) -> None:
        """Stop, after at most one forward pass, and free its memory."""
        self._stop.set()
        self.wait()

    @property
    def failure(self) -> BaseException | None:
        """Exception that it failed with, once it is done."""
        return self._future.exception()

    def result(self) -> tuple[Prefilled, float]:
        """Once done without failure, the group, ready for the caller's stream, and the seconds it took."""
        group, seconds = self._future.result()
        if self._stream is not None:
            here = torch.cuda.current_stream(self._stream.device)
            here.wait_stream(self._stream)
            # Allocated in the other stream, which must not reuse them before this stream has read them.
            for tensor in group.tensors:
                tensor.record_stream(here)
        return group, seconds


def _run(
    compute: Compute, stop: Event, stream: torch.cuda.Stream | None, clock: Callable[[], float]
) -> tuple[Prefilled, float]:
    """Run in the thread. Inference mode and the current stream are per thread."""
    start = clock()
    with torch.inference_mode(), torch.cuda.stream(stream):
        group = compute(stop.is_set)
        if stream is not None:  # else the batch would wait behind kernels that are only queued
            stream.synchronize()
    return group, clock() - start
