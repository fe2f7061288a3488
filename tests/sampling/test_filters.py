"""Filters and penalties against transformers' own, and what they are made of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_support import CPU, random_logits, sample_many
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from winnow.sampling.counts import TokenCounts
from winnow.sampling.filters import TopK, draw, keep_min_p, keep_top_k, keep_top_p, scale

ROWS, VOCAB = 20, 300


def scaled(temperature: float = 1.0) -> Tensor:
    logits = random_logits(ROWS, VOCAB, seed=2)
    scale(logits, torch.full((ROWS, 1), temperature))
    return logits


def column(value: Any) -> Tensor:
    return torch.full((ROWS,), value)


def top_k(logits: Tensor, k: int) -> TopK:
    return keep_top_k(logits, column(k), k)


def top_p(logits: Tensor, p: float, kept: TopK | None = None) -> None:
    keep_top_p(logits, column(p).double(), kept)


CASES: list[tuple[Any, Callable[[Tensor], Any]]] = [
    *[(TopKLogitsWarper(k), lambda x, k=k: top_k(x, k)) for k in (1, 5, 299, 300)],
    *[(TopPLogitsWarper(p), lambda x, p=p: top_p(x, p)) for p in (0.01, 0.5, 0.9, 0.999)],
    *[
        (MinPLogitsWarper(p), lambda x, p=p: keep_min_p(x, column(p).log()[:, None]))
        for p in (0.02, 0.1, 0.5, 1.0)
    ],
]


@pytest.mark.parametrize(("theirs", "ours"), CASES, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_filters_keep_what_transformers_keeps(
    theirs: Any, ours: Callable[[Tensor], Any], temperature: float
) -> None:
    logits = scaled(temperature)
    expected = theirs(None, logits.clone())
    ours(logits)
    assert torch.equal(logits, expected)
    assert logits.isneginf().any() or getattr(theirs, "top_k", 0) == VOCAB


@pytest.mark.parametrize(("k", "p", "min_p"), [(40, 0.9, 0.0), (10, 0.5, 0.01), (250, 0.95, 0.1)])
def test_filters_together_keep_what_transformers_keeps(k: int, p: float, min_p: float) -> None:
    logits = random_logits(ROWS, VOCAB, seed=2)
    theirs = [TemperatureLogitsWarper(1.7), MinPLogitsWarper(min_p), TopKLogitsWarper(k), TopPLogitsWarper(p)]
    expected = LogitsProcessorList(theirs)(None, logits.clone())
    scale(logits, torch.full((ROWS, 1), 1.7))
    keep_min_p(logits, column(min_p).log()[:, None])
    top_p(logits, p, top_k(logits, k))
    assert torch.equal(logits.isneginf(), expected.isneginf())
    torch.testing.assert_close(logits.softmax(1), expected.softmax(1))


def test_top_k_differs_from_row_to_row() -> None:
    logits = scaled()
    k = torch.arange(1, ROWS + 1)
    kept = keep_top_k(logits, k, ROWS)
    assert torch.equal((~logits.isneginf()).sum(1), k)
    assert torch.equal((~kept.values.isneginf()).sum(1), k)


def test_top_p_after_top_k_weighs_the_equals_of_the_kth() -> None:
    """Eleven equals after the top token: top-p must know all of them, though top-k lists three."""
    row = [1.0] + [0.0] * 11
    for p, kept in [(0.1, 1), (0.19, 1), (0.21, 12)]:  # the top token alone has e / (e + 11) = 0.198
        logits = torch.tensor([row])
        scale(logits, torch.ones(1, 1))
        keep_top_p(logits, torch.tensor([p]).double(), keep_top_k(logits, torch.tensor([3]), 3))
        assert int((~logits.isneginf()).sum()) == kept


def test_repetition_penalty_is_transformers() -> None:
    logits = random_logits(1, VOCAB, seed=4)
    prompt, output = [1, 5, 5, 9], [7, 9, 250]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    counts = TokenCounts(VOCAB, CPU)
    rows = torch.tensor([counts.acquire(prompt, output)])
    zero = torch.zeros(1, 1)
    counts.penalise(logits, rows, torch.full((1, 1), 1.7), zero, zero)
    assert torch.equal(logits, expected)


def test_frequency_and_presence_look_at_the_answer_alone() -> None:
    counts = TokenCounts(6, CPU)
    rows = torch.tensor([counts.acquire([0, 0, 1], [1, 2, 2])])
    counts.record(rows, torch.tensor([2]))
    logits = torch.zeros(1, 6)
    counts.penalise(logits, rows, torch.ones(1, 1), torch.full((1, 1), 0.5), torch.full((1, 1), 0.25))
    assert logits.tolist() == [[0.0, -0.75, -1.75, 0.0, 0.0, 0.0]]


def test_draw_inverts_the_cumulative_distribution() -> None:
    logits = torch.tensor([[0.2, 0.0, 0.5, 0.3, 0.0]]).log()
    uniform = [0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-53]
    tokens = draw(logits.expand(6, -1), torch.tensor(uniform, dtype=torch.float64))
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]
    impossible_first = torch.tensor([[-torch.inf, 0.0]])
    assert draw(impossible_first, torch.zeros(1, dtype=torch.float64)).tolist() == [1]


def test_draw_reaches_rare_tokens_at_the_end_of_a_large_vocabulary() -> None:
    """A float32 sum would round 1e-9 away."""
    logits = torch.full((1, 100_000), -torch.inf)
    logits[0, 0], logits[0, -1] = 0.0, -20.0
    assert draw(logits, torch.tensor([1 - 1e-9], dtype=torch.float64)).tolist() == [99_999]
    assert draw(logits, torch.tensor([1 - 3e-9], dtype=torch.float64)).tolist() == [0]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 2.0}, range(8)),
        ({"top_k": 3}, [5, 6, 7]),
        ({"top_p": 0.75}, [5, 6, 7]),
        ({"min_p": 0.4}, [6, 7]),
        ({"top_k": 5, "top_p": 0.9, "temperature": 0.7}, [5, 6, 7]),
    ],
    ids=str,
)
def test_draws_are_distributed_as_asked(params: dict[str, Any], kept: list[int]) -> None:
    """Chi-square over 20,000 draws of fixed seeds: the same verdict on every run."""
    logits = torch.arange(8) * 0.6
    weights = (logits / params.get("temperature", 1.0)).exp()
    expected = torch.zeros(8)
    expected[list(kept)] = weights[list(kept)]
    expected *= 20_000 / expected.sum()
    tokens = sample_many(logits, 1000, steps=20, **params)
    seen = torch.bincount(torch.tensor(tokens), minlength=8)
    used = expected > 0
    assert int(seen[~used].sum()) == 0
    chi_square = float(((seen - expected)[used] ** 2 / expected[used]).sum())
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001; stricter for fewer
