"""What the Triton backend tells the scores, against the reference: sequences of one batch tell different things."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton_case import DEVICE, SMALL, build, compare, compute, with_observers

from winnow.attention import AttentionObserver, AttentionSpec, Group, ReferenceBackend, Smoothing, Term
from winnow.attention.triton import TritonBackend, attend

SPEC = AttentionSpec(
    1.0,
    window=20,
    softcap=3.0,
    sinks=torch.linspace(-1, 1, 6, device=DEVICE),
    slopes=0.3 ** torch.arange(6, device=DEVICE),
    chunked=True,
)
TERMS = [*((term,) for term in Term), (Term.ATTENTION, Term.SQUARED)]
EVERY = {
    (i, j, replace): AttentionObserver(terms, group, 2 * ((i // 2 + j) % 2), replace)
    for (i, terms), (j, group), replace in itertools.product(
        enumerate(TERMS), enumerate(Group), [False, True]
    )
}
POOLED = {
    (j, k, per_query_head, skip_window): AttentionObserver(
        (Term.ATTENTION,), group, replace=True, smoothing=Smoothing(*size, per_query_head, skip_window)
    )
    for (j, group), (k, size), per_query_head, skip_window in itertools.product(
        enumerate(Group), enumerate([(3, "max"), (5, "average")]), [False, True], [False, True]
    )
}
# Of these the interpreter takes as many as have any two of their values together.
PAIRS = [each for (i, j, replace), each in EVERY.items() if replace == (i + j) % 2]
POOLED_PAIRS = [
    each
    for (j, k, per_query_head, skip_window), each in POOLED.items()
    if per_query_head == (j + k) % 2 and skip_window == (k + j // 2) % 2
]


def of_six(observers: list[AttentionObserver]) -> list[list[AttentionObserver | None]]:
    """Batches for three decoding sequences and three chunks, in which each kind sees every observer."""
    halves = [observers[i : i + 3] for i in range(0, len(observers), 3)]
    halves[-1] = (halves[-1] * 3)[:3]
    return [[*a, *b] for a, b in zip(halves, halves[1:] + halves[:1], strict=True)]


@pytest.mark.parametrize("observe", of_six(PAIRS))
def test_equals_the_reference(observe: list[AttentionObserver | None]) -> None:
    compare(build(23, [1, 1, 1, 3, 6, 11], num_accumulators=2, longest=24, observe=observe), SPEC)


@pytest.mark.parametrize("observe", of_six(POOLED_PAIRS))
def test_pooled_equals_the_reference(observe: list[AttentionObserver | None]) -> None:
    compare(build(29, [1, 1, 1, 3, 6, 11], longest=24, observe=observe), SPEC)


def test_watched_and_unwatched_share_a_batch() -> None:
    """Also where the window of a chunk begins after it, so that no query of it counts."""
    seen, pooled = AttentionObserver(), AttentionObserver(replace=True, smoothing=Smoothing(3))
    case = build(31, [1, 1, 1, 1, 6, 6, 6], observe=[None, seen, None, seen, None, seen, pooled])
    case.spans.observe_from[5] = 1000
    compare(case, SPEC)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    compare(build(37, [1, 1, 9], dtype=dtype, group=1, observe=[AttentionObserver()] * 3), AttentionSpec(0.3))


@pytest.mark.parametrize("term", Term)
def test_decoding_is_observed_without_tiles_of_queries(term: Term, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is observed: one launch that reads the KVs for attention, and one for each term."""
    launched: list[tuple[str, int]] = []
    for name in ("attend_split", "merge_splits", "observe_decode", "attend_chunk", "observe_chunk"):
        monkeypatch.setattr(attend, name, Counted(getattr(attend, name), name, launched))
    case = build(41, [1] * 2, longest=40, observe=[AttentionObserver((term,))] * 2)
    compute(TritonBackend(SMALL), case, SPEC)
    longest, kv_heads = int(case.spans.lengths.max()), case.k.shape[1]
    splits = min(SMALL.max_splits, -(-longest // SMALL.min_split))
    assert launched == [
        ("attend_split", 2 * kv_heads * splits),
        ("merge_splits", 2 * case.q.shape[1]),
        ("observe_decode", 2 * kv_heads),
    ]


@dataclass
class Counted:
    """A kernel that notes its launches: its name and the programs of its grid."""

    kernel: Any
    name: str
    launched: list[tuple[str, int]]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launched.append((self.name, math.prod(grid)))
        return self.kernel[grid]


def test_several_launches_when_scratch_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_RAW_BYTES", 4 * 6 * 40)
    compare(build(41, [1] * 4, observe=[AttentionObserver()] * 4), SPEC)


def test_the_same_for_every_value_is_not_below_average() -> None:
    """Equal logits: every weight is the average, however it is rounded."""
    case = build(43, [1, 8], observe=[AttentionObserver((Term.BELOW_AVERAGE,), replace=True)] * 2)
    case.q.zero_()
    before = compute(ReferenceBackend(), with_observers(case, [None, None]), AttentionSpec(1.0)).pool
    after = compute(TritonBackend(), case, AttentionSpec(1.0)).pool
    changed = after.accumulators != before.accumulators
    assert changed.any() and not after.accumulators[changed].any()


@pytest.mark.parametrize("counts", [[1, 1], [7, 9]], ids=["decode", "chunks"])
@pytest.mark.parametrize(
    "changed",
    [
        *(AttentionObserver((term,), Group.MEAN, 2) for term in Term if term is not Term.ATTENTION),
        AttentionObserver(group=Group.SUM, exclude_first=2),
        AttentionObserver(group=Group.MAX, exclude_first=2),
        AttentionObserver(group=Group.MEAN),
        AttentionObserver(group=Group.MEAN, exclude_first=2, replace=True),
    ],
)
def test_another_observer_would_be_noticed(counts: list[int], changed: AttentionObserver) -> None:
    right = AttentionObserver((Term.ATTENTION,), Group.MEAN, 2)
    case = build(47, counts, longest=20, observe=[right] * 2)
    expected = compute(ReferenceBackend(), case, SPEC).pool.accumulators
    found = compute(ReferenceBackend(), with_observers(case, [changed] * 2), SPEC).pool.accumulators
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make test-gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("observe", [*of_six([*EVERY.values()]), *of_six([*POOLED.values()])])
def test_real_shapes(dtype: torch.dtype, observe: list[AttentionObserver | None]) -> None:
    sizes = {
        "longest": 3000,
        "kv_heads": 4,
        "group": 4,
        "head_dim": 128,
        "block_size": 16,
        "num_accumulators": 2,
    }
    case = build(53, [1, 1, 1, 3, 40, 300], dtype=dtype, observe=observe, **sizes)
    # Of millions of weights a few lie so near the average that rounding decides on which side.
    counts = any(o is not None and Term.BELOW_AVERAGE in o.terms for o in observe)
    compare(case, AttentionSpec(128**-0.5, 700, 5.0), tuning=None, score_atol=3.0 if counts else None)
