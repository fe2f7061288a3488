"""CUDA graphs of steps: a step of many small launches becomes one.

A graph repeats the very launches it saw, so all that differs between steps must lie in device memory at fixed places:
a `StaticBatch` is filled with tokens, slots and positions, and lengths and tables are read from the cache's own
tensors. What the host decides must not differ, so batches are filled up to shapes out of short lists.

A step of a shape without a graph is launched kernel by kernel. A shape that came twice is captured after such a step
was submitted: the host records the next graph while the device computes.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.attention import AttentionObserver, Spans
from winnow.attention.spans import NEVER

# Batches are filled up to a power of two, large ones to a multiple of this.
_BATCH_STEP = 64
# Chunks are filled up to this number of tokens times a power of _GROWTH, their sequences to such a power.
_LEAST_TOKENS = 32
# Grids cover rows of this many KVs, times powers of _GROWTH. Programs beyond a row's end leave at once.
_LEAST_LENGTH = 1024
_GROWTH = 4
# A sequence that only fills the batch: its rows are empty.
_NOBODY = -1


@dataclass(frozen=True)
class BatchShape:
    """Shape of a batch: all that the host decides of a step's launches."""

    decodes: int  # sequences that bring a token each
    chunks: int  # sequences that bring more
    chunk_tokens: int
    logits: int  # tokens whose logits are wanted
    longest: int  # KVs in the longest row of those that bring a token each
    observe: AttentionObserver | None

    @classmethod
    def around(cls, spans: Spans, wanted: int, max_num_seqs: int) -> "BatchShape | None":
        """Return the least shape, out of short lists, that a batch fits in; None: there is none."""
        decodes, batch = spans.num_decodes, len(spans.counts)
        observers = spans.active_observers
        if wanted > max_num_seqs or any(each != observers[0] for each in observers):
            return None
        return cls(
            min(_round_batch(decodes), max_num_seqs) if decodes else 0,
            _round_up(batch - decodes, 1) if batch > decodes else 0,
            _round_up(int(spans.counts[decodes:].sum()), _LEAST_TOKENS) if batch > decodes else 0,
            min(_round_batch(max(wanted, batch)), max_num_seqs),
            _round_up(int(spans.lengths[:decodes].max(initial=0)), _LEAST_LENGTH),
            observers[0],
        )

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk_tokens

    @property
    def sequences(self) -> int:
        """Number of sequences, with the one to which the tokens belong that only fill the chunks."""
        return self.decodes + self.chunks + (self.chunk_tokens > 0)


class _Places(NamedTuple):
    """Places of a batch's parts, in tensors or arrays of int64."""

    token_slots: Any  # [T]: -1: a token only fills the batch
    position: Any
    tokens_after: Any
    slots: Any  # [B]
    starts: Any
    counts: Any
    wanted: Any  # [n]


class StaticBatch:
    """Batch of fixed shape in fixed memory, filled anew for each step: the input of a CUDA graph. It has `tokens`,
    int64 [T], of which those `wanted`, int64 [n], need logits, and `spans`: slots are -1 of sequences that fill it."""

    def __init__(self, shape: BatchShape, device: torch.device | str) -> None:
        self._shape = shape
        self._layout = torch.from_numpy(_layout(shape, None, [])).to(device)
        self.tokens = torch.zeros(shape.tokens, dtype=torch.int64, device=device)
        places = _Places(*self._layout.split(_sizes(shape)))
        self.wanted = places.wanted
        ones = np.ones(shape.sequences, dtype=np.int64)
        host_counts = ones.copy()
        host_counts[shape.decodes :] = 0
        host_counts[-1] += shape.chunk_tokens
        self.spans: Spans = _StaticSpans(
            slots=ones * _NOBODY,
            counts=host_counts,
            lengths=ones * shape.longest,
            position=places.position,
            first_position=ones * 0,
            observe=(shape.observe,) * shape.sequences,
            observe_from=ones * 0,
            select_from=ones * NEVER,
            temporary=ones > 1,
            shape=shape,
            places=places,
        )

    def fill(self, tokens: Tensor, spans: Spans, wanted: Sequence[int]) -> None:
        """Put a batch that fits into place: its tokens, int64 [T] on the device, and those whose logits are wanted."""
        self._layout.copy_(torch.from_numpy(_layout(self._shape, spans, wanted)))
        decodes, first = spans.num_decodes, self._shape.decodes
        self.tokens[:decodes] = tokens[:decodes]
        if len(tokens) > decodes:
            self.tokens[first : first + len(tokens) - decodes] = tokens[decodes:]


@dataclass(frozen=True)
class _StaticSpans(Spans):
    """Layout whose host side says how much room there is, and the device what is in it."""

    shape: BatchShape
    places: _Places

    @property
    def num_decodes(self) -> int:
        return self.shape.decodes

    @property
    def device_slots(self) -> Tensor:
        return self.places.slots

    @property
    def token_slots(self) -> Tensor:
        return self.places.token_slots

    @property
    def tokens_after(self) -> Tensor:
        return self.places.tokens_after

    def chunk_layout(self, index: Sequence[int], tile_queries: int) -> tuple[Tensor, Tensor]:
        """See `Spans.chunk_layout`; tiles beyond those of the chunks are of no token."""
        starts, counts, decodes = self.places.starts, self.places.counts, self.shape.decodes
        number = self.shape.chunk_tokens // tile_queries + self.shape.sequences - decodes
        tiles = (counts[decodes:] + tile_queries - 1) // tile_queries
        ends = tiles.cumsum(0)
        tile = torch.arange(number, device=self.device)
        sequence = torch.searchsorted(ends, tile, right=True).clamp_(max=len(tiles) - 1)
        within = tile - (ends - tiles)[sequence]
        return (
            torch.stack([sequence + decodes, within * tile_queries], dim=1).int(),
            torch.stack([starts, counts, torch.zeros_like(starts)], dim=1).int(),
        )


def _sizes(shape: BatchShape) -> list[int]:
    return [shape.tokens] * 3 + [shape.sequences] * 3 + [shape.logits]


def _layout(shape: BatchShape, spans: Spans | None, wanted: Sequence[int]) -> NDArray[np.int64]:
    """Return what a static batch holds of a batch, or of none, one behind the other."""
    flat = np.zeros(sum(_sizes(shape)), dtype=np.int64)
    places = _Places(*np.split(flat, np.cumsum(_sizes(shape))[:-1]))
    places.token_slots[:] = places.slots[:] = _NOBODY
    used = 0
    if spans is not None:
        decodes, batch, total = spans.num_decodes, len(spans.counts), int(spans.counts.sum())
        sequence, token = np.arange(batch), np.arange(total)
        for each in (sequence, token):  # all that follows the sequences with one token
            each[decodes:] += shape.decodes - decodes
        used = total - decodes
        places.slots[sequence], places.starts[sequence] = spans.slots, token[spans.starts]
        places.counts[sequence] = spans.counts
        within = np.arange(total) - np.repeat(spans.starts, spans.counts)
        places.token_slots[token] = np.repeat(spans.slots, spans.counts)
        places.position[token] = np.repeat(spans.first_position, spans.counts) + within
        places.tokens_after[token] = np.repeat(spans.counts, spans.counts) - 1 - within
        places.wanted[: len(wanted)] = token[np.asarray(wanted, dtype=np.int64)]
    if shape.chunk_tokens:
        places.starts[-1], places.counts[-1] = shape.decodes + used, shape.chunk_tokens - used
    return flat


def _round_batch(batch: int) -> int:
    if batch > _BATCH_STEP:
        return -(-batch // _BATCH_STEP) * _BATCH_STEP
    return 1 << (batch - 1).bit_length()


def _round_up(number: int, least: int) -> int:
    bound = least
    while bound < number:
        bound *= _GROWTH
    return bound


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
        self._forward, self._capturable, self._capture = forward, capturable, capture
        self._max_num_seqs, self._device = max_num_seqs, torch.device(device)
        self._graphs: dict[BatchShape, _Graph | None] = {}
        self._met: dict[BatchShape, int] = {}
        self._gave_up = False
        # Logits of all graphs, the largest batch of them: each of its own would take a vocabulary a row and graph.
        self._logits: list[Tensor] = []

    def run(self, tokens: Tensor, spans: Spans, wanted: Sequence[int]) -> Tensor | None:
        """Return the logits of a step's tokens, int64 [T] on the device, as far as they are wanted: [n, V], good until
        the next call. None: there is no graph for such a step, now or ever, so it must be computed kernel by kernel."""
        if self._gave_up or int(spans.counts[spans.num_decodes :].sum()) > MOST_CHUNK_TOKENS:
            return None
        shape = BatchShape.around(spans, len(wanted), self._max_num_seqs)
        if shape is None:
            return None
        if shape not in self._graphs:
            self._met[shape] = self._met.get(shape, 0) + 1
        graph = self._graphs.get(shape)
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
