"""CUDA graphs of steps: a step of many small launches becomes one.

A graph repeats the very launches it saw, so all that differs between steps must lie in device memory at fixed places:
a `StaticBatch` is filled with tokens, slots and positions, and lengths and tables are read from the cache's own
tensors. What the host decides must not differ, so batches are filled up to shapes out of short lists.

A step of a shape without a graph is launched kernel by kernel. A shape that came twice is captured after such a step
was submitted: the host records the next graph while the device computes.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from winnow.attention import Spans
from winnow.executor.static_batch import BatchShape, StaticBatch

# Steps with more tokens of chunks keep the device busy while the host launches them.
MOST_CHUNK_TOKENS = 512
# Graphs take memory of the driver; later shapes are launched as ever.
_MOST_GRAPHS = 128

# The logits [n, V] of the wanted ones, int64 [n], of a batch's tokens, int64 [T].
Forward = Callable[[Tensor, Spans, Tensor], Tensor]
# Makes a computation repeatable: what it returns computes again from what then lies in the same memory.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
_Graph = tuple[StaticBatch, Callable[[], Tensor]]


def graph_capture(device: torch.device) -> Capture | None:
    """Return a new capture of a device's work as a graph; None: the device has no graphs."""
    return CudaCapture() if device.type == "cuda" else None


def computes_apart(device: torch.device) -> bool:
    """Return whether a device computes while the host continues, so that the next step is submitted meanwhile."""
    return device.type == "cuda"


class CudaCapture:
    """Capture of CUDA graphs, which share one pool of memory: they never run at the same time.

    It waits for nothing: `torch.cuda.graph` would, and would collect garbage while requests wait.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream()

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            compute()  # first, as kernels are compiled and libraries set up, which a capture may not do
            # What other threads do meanwhile, for another LLM perhaps, is no part of it.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = compute()
            finally:
                graph.capture_end()
        current.wait_stream(self._aside)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class StepGraphs:
    """Runner of steps as CUDA graphs, where it can.

    Args:
        forward: computes the model; must launch the same work for spans of the same shape, and wait for nothing.
        capturable: whether attention over such spans can be captured (see `AttentionBackend.capturable`).
        max_num_seqs: most sequences of a batch.
        capture: `CudaCapture()`, or on a CPU a stand-in that computes again.
    """

    def __init__(
        self,
        forward: Forward,
        capturable: Callable[[Spans], bool],
        max_num_seqs: int,
        device: torch.device | str,
        capture: Capture,
    ) -> None:
        self._forward = forward
        self._capturable = capturable
        self._max_num_seqs = max_num_seqs
        self._device = torch.device(device)
        self._capture = capture
        self._graphs: dict[BatchShape, _Graph | None] = {}
        self._met: dict[BatchShape, int] = {}
        self._gave_up = False
        # Logits of all graphs, the largest batch of them: each of its own would take a vocabulary a row and graph.
        self._logits: list[Tensor] = []

    def run(self, tokens: Tensor, spans: Spans, wanted: Sequence[int]) -> Tensor | None:
        """Return the logits of a step.

        Args:
            tokens: of the batch, int64 [T] on the device.
            wanted: those whose logits are wanted.

        Returns:
            [n, V], good until the next call; None where there is no graph for such a step, now or ever: it must be
            computed kernel by kernel.
        """
        shape = self._shape(spans, len(wanted))
        if shape is None:
            return None
        if shape not in self._graphs:
            self._met[shape] = self._met.get(shape, 0) + 1
            return None
        graph = self._graphs[shape]
        if graph is None:
            return None
        batch, replay = graph
        batch.fill(tokens, spans, wanted)
        return replay()[: len(wanted)]

    def capture_repeated(self) -> None:
        """Capture shapes that came twice; to be called when a step was submitted, before its result is waited for."""
        for shape in [shape for shape, times in self._met.items() if times > 1]:
            del self._met[shape]
            if len(self._graphs) < _MOST_GRAPHS:
                self._graphs[shape] = self._make(shape)

    def _shape(self, spans: Spans, wanted: int) -> BatchShape | None:
        if self._gave_up or int(spans.counts[spans.num_decodes :].sum()) > MOST_CHUNK_TOKENS:
            return None
        return BatchShape.around(spans, wanted, self._max_num_seqs)

    def _make(self, shape: BatchShape) -> _Graph | None:
        """Capture over an empty batch: what runs meanwhile writes no KV and adds to no score."""
        batch = StaticBatch(shape, self._device)
        if not self._capturable(batch.spans):
            return None
        # A graph that held `self` would keep all of them until garbage is collected.
        forward, room, most = self._forward, self._logits, self._max_num_seqs

        def compute() -> Tensor:
            logits = forward(batch.tokens, batch.spans, batch.wanted)
            if not room:  # before anything is captured
                room.append(logits.new_empty(most, *logits.shape[1:]))
            return room[0][: len(logits)].copy_(logits)

        try:
            return batch, self._capture(compute)
        except RuntimeError as error:
            # A model may do what no graph can hold, such as ask the device for a number.
            warnings.warn(f"steps run without CUDA graphs, more slowly: {error}", stacklevel=2)
            self._gave_up = True
            return None
