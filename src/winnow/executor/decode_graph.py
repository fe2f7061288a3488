"""CUDA graphs of decoding steps: a step of many small launches becomes one.

A graph repeats the very launches it saw, so all that differs between steps must lie in device memory at fixed places:
tokens, slots and positions are copied there, and lengths and tables are read from the cache's own tensors. What the
host decides must not differ: batches are filled up to a size from a short list, and grids cover rows up to a length
from another. There is one graph for each pair of them, captured when it is first needed.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from winnow.attention import AttentionObserver, Spans
from winnow.attention.spans import NEVER

# Batches are filled up to a power of two, large ones to a multiple of this.
_BATCH_STEP = 64
# Grids cover rows of this many KVs, times powers of _LENGTH_GROWTH. Programs beyond a row's end leave at once.
_LEAST_LENGTH = 1024
_LENGTH_GROWTH = 4
# A sequence that only fills the batch: its rows are empty.
_NOBODY = -1

# The logits [B, V] of B decoding sequences, from their tokens, int64 [1, B].
Forward = Callable[[Tensor, Spans], Tensor]
# Makes a computation repeatable: what it returns computes again from what then lies in the same memory.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def graph_capture(device: torch.device) -> Capture | None:
    """Return how a device repeats what it computed once; None: it has no graphs."""
    return CudaCapture() if device.type == "cuda" else None


def computes_apart(device: torch.device) -> bool:
    """Return whether a device computes while the host continues, so that the next step is submitted meanwhile."""
    return device.type == "cuda"


class CudaCapture:
    """Capture of CUDA graphs, which share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # On a stream of its own first: kernels are compiled and libraries set up, which a capture may not do.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            compute()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, for another LLM perhaps, is no part of it.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True)
class _StaticSpans(Spans):
    """Decoding sequences whose slots and positions lie at fixed places on the device."""

    static_slots: Tensor

    @property
    def device_slots(self) -> Tensor:
        return self.static_slots


@dataclass(frozen=True)
class _Key:
    """Shape for which one graph is made."""

    batch: int
    longest: int
    observe: AttentionObserver | None


@dataclass(frozen=True)
class _Graph:
    inputs: Tensor
    """int64 [3, batch] on the device: tokens, slots, positions."""
    replay: Callable[[], Tensor]


class DecodeGraphs:
    """Runner of decoding steps as CUDA graphs, where it can.

    Args:
        forward: computes the model; must launch the same work for the same spans, and wait for nothing.
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
        self._graphs: dict[_Key, _Graph | None] = {}
        self._gave_up = False
        # Logits of all graphs, the largest batch of them: each of its own would take a vocabulary a row and graph.
        self._logits: list[Tensor] = []

    def run(self, tokens: Tensor, spans: Spans) -> Tensor | None:
        """Return the logits of a step.

        Args:
            tokens: one of each sequence, int64 [B] on the device.

        Returns:
            [B, V], good until the next call; None where the step cannot be a graph and must be computed as ever:
            prefill chunks are in it, or sequences tell the scores different things.
        """
        key = None if self._gave_up else self._key(spans)
        if key is None:
            return None
        if key not in self._graphs:
            self._graphs[key] = self._make(key)
        graph = self._graphs[key]
        if graph is None:
            return None
        inputs = _empty_inputs(key.batch)
        inputs[1:, : len(tokens)] = [spans.slots, spans.first_position]
        graph.inputs.copy_(torch.from_numpy(inputs))
        graph.inputs[0, : len(tokens)] = tokens
        return graph.replay()[: len(tokens)]

    def _key(self, spans: Spans) -> _Key | None:
        """Return which graph computes this step, or None."""
        batch = len(spans.counts)
        if spans.num_decodes < batch or batch > self._max_num_seqs:
            return None
        observe = spans.observe[0]
        if spans.observe.count(observe) < batch:
            return None
        if observe is not None and bool((spans.first_position < spans.observe_from).any()):
            return None
        return _Key(
            min(_round_batch(batch), self._max_num_seqs), _round_length(int(spans.lengths.max())), observe
        )

    def _make(self, key: _Key) -> _Graph | None:
        """Capture over an empty batch: what runs meanwhile writes no KV and adds to no score."""
        inputs = torch.from_numpy(_empty_inputs(key.batch)).to(self._device)
        token, slot, position = inputs
        ones = np.ones(key.batch, dtype=np.int64)
        spans = _StaticSpans(
            slots=ones * _NOBODY,
            counts=ones,
            lengths=ones * key.longest,
            position=position,
            first_position=ones * 0,
            observe=(key.observe,) * key.batch,
            observe_from=ones * 0,
            select_from=ones * NEVER,
            temporary=ones > 1,
            static_slots=slot,
        )
        if not self._capturable(spans):
            return None
        # A graph that held `self` would keep all of them until garbage is collected.
        forward, room, most = self._forward, self._logits, self._max_num_seqs

        def compute() -> Tensor:
            logits = forward(token[None], spans)
            if not room:  # before anything is captured
                room.append(logits.new_empty(most, *logits.shape[1:]))
            return room[0][: len(logits)].copy_(logits)

        try:
            return _Graph(inputs, self._capture(compute))
        except RuntimeError as error:
            # A model may do what no graph can hold, such as ask the device for a number.
            warnings.warn(f"decoding runs without CUDA graphs, more slowly: {error}", stacklevel=2)
            self._gave_up = True
            return None


def _empty_inputs(batch: int) -> np.ndarray:
    """Return tokens, slots and positions of no sequence, int64 [3, batch]."""
    return np.repeat(np.array([[0], [_NOBODY], [0]], dtype=np.int64), batch, axis=1)


def _round_batch(batch: int) -> int:
    if batch > _BATCH_STEP:
        return -(-batch // _BATCH_STEP) * _BATCH_STEP
    return 1 << (batch - 1).bit_length()


def _round_length(longest: int) -> int:
    bound = _LEAST_LENGTH
    while bound < longest:
        bound *= _LENGTH_GROWTH
    return bound
