"""Decoding steps as graphs against the same steps computed eagerly; without a GPU a stand-in computes again."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from tests.attention.paged import contents_of
from torch import Tensor

from winnow.attention import (
    AttentionBackend,
    AttentionObserver,
    AttentionSpec,
    Group,
    ReferenceBackend,
    Smoothing,
    Spans,
    Term,
)
from winnow.attention.triton import TritonBackend
from winnow.cache import CacheLayout, CacheSize, LocalCache
from winnow.executor import decode_graph
from winnow.executor.decode_graph import CudaCapture, DecodeGraphs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, HEADS, GROUP, DIM, VOCAB = 2, 2, 2, 8, 11
MAX_SEQS = 5


@dataclass
class StandIn:
    """Like a graph it computes once when captured, and later sees only what lies in the memory it saw then."""

    batches: list[int] = field(default_factory=list)

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        capture = CudaCapture() if DEVICE == "cuda" else _again
        self.batches.append(len(compute()))
        return capture(compute)


def _again(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return compute


class Engine:
    """Two layers of nothing but attention, over a cache of their own."""

    def __init__(self, backend: AttentionBackend) -> None:
        layout = CacheLayout.even(LAYERS, HEADS, DIM, 4, torch.float32, num_accumulators=1)
        self.cache = LocalCache(layout, CacheSize(400, 20, MAX_SEQS, 2), DEVICE)
        self.pool = self.cache.paged.pool
        for part in (
            self.pool.of_layer(-1).k,
            self.pool.of_layer(-1).v,
            self.pool.accumulators,
            self.pool.position,
        ):
            part.zero_()
        self.backend = backend
        generator = torch.Generator().manual_seed(0)
        width = HEADS * DIM
        self.embed = torch.randn(VOCAB, (GROUP + 2) * width, generator=generator).to(DEVICE)
        self.head = torch.randn(GROUP * width, VOCAB, generator=generator).to(DEVICE)
        self.capture = StandIn()
        self.graphs = DecodeGraphs(
            self.forward,
            lambda spans: backend.capturable(spans, HEADS * GROUP),
            MAX_SEQS,
            DEVICE,
            self.capture,
        )

    def forward(self, tokens: Tensor, spans: Spans) -> Tensor:
        cache, x = self.cache.paged, self.embed[tokens[0]].unflatten(1, (-1, DIM))
        q, k, v = x.split([GROUP * HEADS, HEADS, HEADS], dim=1)
        for layer in range(LAYERS):
            self.backend.prepare(cache, spans).write(layer, k, v)
            q = q + self.backend.prepare(cache, spans).attend(layer, q, AttentionSpec(0.3))
        return q.flatten(1) @ self.head

    def spans(
        self, starts: dict[int, int], count: int = 1, observe: AttentionObserver | None = None
    ) -> Spans:
        """Room for `count` more tokens of the sequences in the slots `starts`, which so far have as many tokens."""
        slots = list(starts)
        self.cache.append(slots, [count] * len(slots))
        return Spans.build(
            slots,
            list(starts.values()),
            [count] * len(slots),
            self.cache.paged.tables.longest(slots),
            DEVICE,
            [observe] * len(slots),
            list(starts.values()),
        )


@pytest.mark.parametrize(
    "observe",
    [None, AttentionObserver((Term.SQUARED,), Group.MAX, 1), AttentionObserver((Term.VALUE_AWARE,))],
    ids=["unwatched", "watched", "values"],
)
def test_equals_eager(observe: AttentionObserver | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graph, "_LEAST_LENGTH", 4)
    graphs, eager = Engine(TritonBackend()), Engine(ReferenceBackend())
    prompt = torch.arange(3 * 4, device=DEVICE)[None] % VOCAB
    for engine in (graphs, eager):
        slots = [engine.cache.ledger.open() for _ in range(4)]
        engine.forward(prompt, engine.spans(dict.fromkeys(slots, 0), 3))
    starts = dict.fromkeys(slots, 3)
    for step, batch in enumerate([1, 4, 3, 3, 3, 2]):
        running = dict(list(starts.items())[-batch:])
        tokens = [(step + slot) % VOCAB for slot in running]
        found = graphs.graphs.run(torch.tensor(tokens), graphs.spans(running, observe=observe))
        expected = eager.forward(torch.tensor([tokens], device=DEVICE), eager.spans(running, observe=observe))
        assert found is not None
        assert found.data_ptr() == graphs.graphs._logits[0].data_ptr(), "graphs share memory of logits"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        starts |= {slot: start + 1 for slot, start in running.items()}
    for found, expected in zip(*(contents_of(each.pool) for each in (graphs, eager)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert bool(eager.pool.accumulators.any()) == (observe is not None)
    # 1 sequence of up to 4 KVs, then 4 of up to 16 (also where 3 run, in the same graph), then 2.
    assert graphs.capture.batches == [1, 4, 2]


@pytest.mark.parametrize(
    "observe",
    [
        [AttentionObserver(), None],
        [AttentionObserver(), AttentionObserver((Term.SQUARED,))],
        [AttentionObserver(replace=True, smoothing=Smoothing(3))] * 2,
    ],
    ids=["some", "differ", "pooled"],
)
def test_what_needs_the_host_is_left_to_it(observe: list[AttentionObserver | None]) -> None:
    engine = Engine(TritonBackend())
    starts = {engine.cache.ledger.open(): 0 for _ in observe}
    spans = engine.spans(starts)
    spans = replace(spans, observe=tuple(observe))
    assert engine.graphs.run(torch.tensor([1, 2]), spans) is None
    assert not engine.capture.batches


def test_chunks_are_left_to_the_host() -> None:
    engine = Engine(TritonBackend())
    spans = engine.spans({engine.cache.ledger.open(): 0}, 3)
    assert engine.graphs.run(torch.tensor([1, 2, 3]), spans) is None


def test_backends_that_wait_for_the_host_are_never_captured() -> None:
    engine = Engine(ReferenceBackend())
    assert engine.graphs.run(torch.tensor([1]), engine.spans({engine.cache.ledger.open(): 0})) is None
    assert not engine.capture.batches


def test_a_model_that_cannot_be_captured_runs_eagerly_ever_after() -> None:
    engine = Engine(TritonBackend())
    attempts = []

    def refuse(tokens: Tensor, spans: Spans) -> Tensor:
        attempts.append(len(spans.counts))
        raise RuntimeError("operation not permitted when stream is capturing")

    engine.graphs._forward = refuse
    slot = engine.cache.ledger.open()
    with pytest.warns(UserWarning, match="without CUDA graphs.*not permitted"):
        assert engine.graphs.run(torch.tensor([1]), engine.spans({slot: 0})) is None
    assert engine.graphs.run(torch.tensor([1]), engine.spans({slot: 1})) is None
    assert len(attempts) == 1


def test_sizes_come_from_short_lists() -> None:
    assert {decode_graph._round_batch(n) for n in range(1, 200)} == {1, 2, 4, 8, 16, 32, 64, 128, 192, 256}
    assert {decode_graph._round_length(n) for n in range(1, 20000, 7)} == {1024, 4096, 16384, 65536}
