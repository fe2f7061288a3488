"""Steps as graphs against the same steps computed eagerly; without a GPU a stand-in computes again."""

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
from winnow.executor import step_graphs
from winnow.executor.step_graphs import MOST_CHUNK_TOKENS, CudaCapture, StepGraphs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, GROUP, DIM, VOCAB = 1, 2, 8, 11
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
    """Layers of nothing but attention, over a cache of their own."""

    def __init__(
        self, backend: AttentionBackend, blocks: int = 400, pages: int = 2, num_layers: int = 1
    ) -> None:
        layout = CacheLayout.even(num_layers, HEADS, DIM, 4, torch.float32, num_accumulators=1)
        self.cache = LocalCache(layout, CacheSize(blocks, 20, MAX_SEQS, pages), DEVICE)
        self.pool = self.cache.paged.pool
        for part in (
            self.pool.of_layer(-1).k,
            self.pool.of_layer(-1).v,
            self.pool.accumulators,
            self.pool.position,
        ):
            part.zero_()
        self.backend, self.num_layers = backend, num_layers
        generator = torch.Generator().manual_seed(0)
        width = HEADS * DIM
        self.embed = torch.randn(VOCAB, (GROUP + 2) * width, generator=generator).to(DEVICE)
        self.head = torch.randn(GROUP * width, VOCAB, generator=generator).to(DEVICE)
        self.capture = StandIn()
        self.graphs = StepGraphs(
            self.forward,
            lambda spans: backend.capturable(spans, HEADS * GROUP),
            MAX_SEQS,
            DEVICE,
            self.capture,
        )

    def forward(self, tokens: Tensor, spans: Spans, wanted: Tensor) -> Tensor:
        cache, x = self.cache.paged, self.embed[tokens].unflatten(1, (-1, DIM))
        q, k, v = x.split([GROUP * HEADS, HEADS, HEADS], dim=1)
        batch = self.backend.prepare(cache, spans)
        for layer in range(self.num_layers):
            batch.write(layer, k, v)
            q = q + batch.attend(layer, q, AttentionSpec(0.3))
        return q[wanted].flatten(1) @ self.head

    def eager(self, tokens: list[int], spans: Spans, wanted: list[int] | None = None) -> Tensor:
        index = range(len(tokens)) if wanted is None else wanted
        return self.forward(torch.tensor(tokens, device=DEVICE), spans, torch.tensor(index, device=DEVICE))

    def run(self, tokens: list[int], spans: Spans, wanted: list[int] | None = None) -> Tensor | None:
        """As an executor does: without a graph the step is launched, and shapes that came twice are captured."""
        index = list(range(len(tokens))) if wanted is None else wanted
        found = self.graphs.run(torch.tensor(tokens, device=DEVICE), spans, index)
        self.graphs.capture_repeated()
        return found

    def captured(self, tokens: list[int], spans: Spans, wanted: list[int] | None = None) -> Tensor | None:
        """Of a shape that has come before, or comes three times."""
        for _ in range(3):
            found = self.run(tokens, spans, wanted)
            if found is not None:
                return found
        return None

    def spans(
        self, starts: dict[int, int], counts: int | list[int] = 1, observe: AttentionObserver | None = None
    ) -> Spans:
        """Room for `counts` more tokens of the sequences in the slots `starts`, which so far have as many tokens."""
        slots = list(starts)
        counts = [counts] * len(slots) if isinstance(counts, int) else counts
        self.cache.append(slots, counts)
        return Spans.build(
            slots,
            list(starts.values()),
            counts,
            self.cache.paged.tables.longest(slots),
            DEVICE,
            [observe] * len(slots),
            list(starts.values()),
        )


@pytest.mark.parametrize(
    "observe", [None, AttentionObserver((Term.SQUARED,), Group.MAX, 1)], ids=["unwatched", "watched"]
)
def test_equals_eager(observe: AttentionObserver | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "_LEAST_LENGTH", 4)
    num_layers = 1 if observe else 2
    graphs, eager = (Engine(each(), num_layers=num_layers) for each in (TritonBackend, ReferenceBackend))
    prompt = [token % VOCAB for token in range(3 * 4)]
    for engine in (graphs, eager):
        slots = [engine.cache.ledger.open() for _ in range(4)]
        engine.eager(prompt, engine.spans(dict.fromkeys(slots, 0), 3))
    starts = dict.fromkeys(slots, 3)
    for step, batch in enumerate([1, 4, 3, 3, 2]):
        running = dict(list(starts.items())[-batch:])
        tokens = [(step + slot) % VOCAB for slot in running]
        found = graphs.captured(tokens, graphs.spans(running, observe=observe))
        expected = eager.eager(tokens, eager.spans(running, observe=observe))
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
    assert engine.captured([1, 2], spans) is None
    assert not engine.capture.batches


def test_steps_with_small_chunks_equal_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside decoding sequences, drafts of which every token counts, and chunks alone."""
    monkeypatch.setattr(step_graphs, "_LEAST_TOKENS", 4)
    graphs, eager = Engine(TritonBackend()), Engine(ReferenceBackend())
    for engine in (graphs, eager):
        slots = [engine.cache.ledger.open() for _ in range(5)]
    starts = dict.fromkeys(slots, 0)
    steps: list[tuple[list[int], list[int], list[int]]] = [
        # Sequences, their tokens, tokens whose logits are wanted.
        ([3, 4], [5, 3], [4, 7]),
        ([3, 4, 0], [1, 1, 5], [0, 1]),  # a prompt's first part has no logits
        ([3, 4, 0, 1], [1, 1, 2, 2], [0, 1, 3, 5]),  # fills its room to the end
        ([0, 3, 1], [1, 1, 2], [0, 1, 2, 3]),  # drafts
        ([2], [MAX_SEQS + 1], [MAX_SEQS]),
        ([4, 3, 0, 1, 2], [1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
    ]
    for number, (members, counts, wanted) in enumerate(steps):
        running = {slots[member]: starts[slots[member]] for member in members}
        tokens = [(3 * number + token) % VOCAB for token in range(sum(counts))]
        found = graphs.captured(tokens, graphs.spans(running, counts), wanted)
        expected = eager.eager(tokens, eager.spans(running, counts), wanted)
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for slot, count in zip(running, counts, strict=True):
            starts[slot] += count
    for found, expected in zip(*(contents_of(each.pool) for each in (graphs, eager)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert graphs.capture.batches == [2, 4, 4, 4, 1, 5], "logits of each shape"


@pytest.mark.parametrize(
    ("counts", "observe"),
    [([1, MOST_CHUNK_TOKENS + 1], None), ([1, 3], AttentionObserver())],
    ids=["large", "watched"],
)
def test_other_chunks_are_launched(counts: list[int], observe: AttentionObserver | None) -> None:
    engine = Engine(TritonBackend(), blocks=2400, pages=10)
    spans = engine.spans({engine.cache.ledger.open(): 0 for _ in counts}, counts, observe)
    assert engine.captured([1] * sum(counts), spans) is None
    assert not engine.capture.batches


def test_more_logits_than_sequences_are_launched() -> None:
    """Logprobs of a prompt: graphs share memory for as many logits as sequences."""
    engine = Engine(TritonBackend())
    spans = engine.spans({engine.cache.ledger.open(): 0}, MAX_SEQS + 1)
    assert engine.captured([1] * (MAX_SEQS + 1), spans) is None  # with one logit it is captured, see above


def test_a_shape_is_captured_when_it_comes_again() -> None:
    engine = Engine(TritonBackend())
    spans = engine.spans({engine.cache.ledger.open(): 0})
    assert engine.run([1], spans) is None and not engine.capture.batches
    assert engine.run([1], spans) is None and engine.capture.batches == [1]
    assert engine.run([1], spans) is not None and engine.capture.batches == [1]


def test_backends_that_wait_for_the_host_are_never_captured() -> None:
    engine = Engine(ReferenceBackend())
    assert engine.captured([1], engine.spans({engine.cache.ledger.open(): 0})) is None
    assert not engine.capture.batches


def test_a_model_that_cannot_be_captured_runs_eagerly_ever_after() -> None:
    engine = Engine(TritonBackend())
    attempts = []

    def refuse(tokens: Tensor, spans: Spans, wanted: Tensor) -> Tensor:
        attempts.append(len(spans.counts))
        raise RuntimeError("operation not permitted when stream is capturing")

    engine.graphs._forward = refuse
    slot = engine.cache.ledger.open()
    with pytest.warns(UserWarning, match="without CUDA graphs.*not permitted"):
        assert engine.captured([1], engine.spans({slot: 0})) is None
    assert engine.captured([1], engine.spans({slot: 1})) is None
    assert len(attempts) == 1


def test_sizes_come_from_short_lists() -> None:
    assert {step_graphs._round_batch(n) for n in range(1, 200)} == {1, 2, 4, 8, 16, 32, 64, 128, 192, 256}
    assert {step_graphs._round_up(n, 1024) for n in range(1, 20000, 7)} == {1024, 4096, 16384, 65536}
