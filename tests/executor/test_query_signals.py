"""What is learnt of queries does not depend on the pieces in which a context is computed."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from winnow.engine.plan import PlannedSequence, StepPlan
from winnow.eviction import (
    EqualHeads,
    EvictionPolicy,
    ExpectedAttention,
    Keep,
    Needs,
    SequenceEviction,
    When,
)
from winnow.executor.occupants import Occupant, Occupants
from winnow.executor.query_signals import QuerySignals, WatchedQueries
from winnow.models.bind.rotation import LayerRotation, ModelRotation
from winnow.sampling import Sampler, SamplingParams

HEADS, QUERY_HEADS, DIM, TOKENS = 2, 4, 6, 75
ROTATION = ModelRotation((LayerRotation(torch.tensor([1.0, 0.1]), False),) * 2)


def learnt(needs: Needs, q: Tensor, k: Tensor, pieces: list[int]) -> QuerySignals:
    """Of one sequence, in slot 3 of a batch whose other tokens are noise."""
    signals = QuerySignals(torch.device("cpu"))
    signals.rotation = ROTATION
    signals._sequences[3] = signals_of(needs)
    start = 0
    for count in pieces:
        noise = torch.randn(5, QUERY_HEADS, DIM)
        watched = WatchedQueries(3, needs, 5, count, start)
        signals.add(
            1,
            [watched],
            torch.cat([noise, q[start : start + count], noise]),
            torch.cat([noise[:, :HEADS], k[start : start + count], noise[:, :HEADS]]),
            scale=0.5,
        )
        start += count
    assert start == len(q)
    return signals


def signals_of(needs: Needs) -> Any:
    signals = QuerySignals(torch.device("cpu"))
    policy = EvictionPolicy(ExpectedAttention(), EqualHeads(), Keep(), When(after_prefill=True))
    object.__setattr__(policy, "score", SimpleNamespace(needs=needs))
    note(signals, policy, 0, TOKENS)
    return signals._sequences[0]


def note(signals: QuerySignals, policy: EvictionPolicy, start: int, count: int, context: int = TOKENS) -> Any:
    """Of a step of one sequence, in slot 0."""
    eviction = SequenceEviction(policy, 10, context, context)
    occupants = Occupants(cast("Sampler", None))  # it samples nothing
    occupants[0] = Occupant([], context, SamplingParams(), 0, eviction)
    return signals.note(StepPlan((PlannedSequence(0, start, [3] * count, 0),)), occupants)


def pieces(seed: int) -> list[int]:
    rng, left, found = random.Random(seed), TOKENS, []
    while left:
        found.append(min(rng.choice([1, 2, 7, 30]), left))
        left -= found[-1]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_moments_are_those_of_unrotated_queries(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # A mean that is large beside the deviation: a sum of squares would lose it.
    plain = torch.randn(TOKENS, QUERY_HEADS, DIM, generator=generator) + 300.0
    position = torch.arange(TOKENS)[:, None].expand(-1, QUERY_HEADS)
    q = ROTATION.turn(1, plain, position)
    k = torch.randn(TOKENS, HEADS, DIM, generator=generator)
    signals = learnt(Needs(moments_from=4), q, k, pieces(seed))
    found = signals.moments(1, [3], (QUERY_HEADS, DIM))
    counted = 0.5 * ROTATION.turn(1, q, -position).double()[4:]
    torch.testing.assert_close(found.mean[0].double(), counted.mean(dim=0), atol=1e-3, rtol=1e-5)
    for head in range(QUERY_HEADS):
        expected = counted[:, head].T.cov(correction=0)
        torch.testing.assert_close(found.covariance[0, head].double(), expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("chunk", [1, 16, 200])
def test_attention_within_chunks(chunk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(TOKENS, QUERY_HEADS, DIM, generator=generator)
    k = torch.randn(TOKENS, HEADS, DIM, generator=generator)
    signals = learnt(Needs(chunk=chunk, chunk_from=3), q, k, pieces(seed))
    for _ in range(2):  # asking changes nothing
        found = signals.chunk_attention(1, [3], HEADS)[0]
        assert found.shape == (HEADS, TOKENS) and not found[:, :3].any()
        for first in range(3, TOKENS, chunk):
            part = slice(first, first + chunk)
            for head in range(HEADS):
                shares = [
                    (q[part, 2 * head + member] @ k[part, head].T).softmax(dim=-1).sum(dim=0)
                    for member in range(2)
                ]
                torch.testing.assert_close(found[head, part], torch.stack(shares).mean(dim=0))


def test_a_fork_goes_on_by_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(TOKENS, heads, DIM, generator=generator) for heads in (QUERY_HEADS, HEADS))
    needs = Needs(moments_from=0, chunk=16)
    signals = learnt(needs, q, k, [TOKENS])
    before = signals.chunk_attention(1, [3], HEADS), signals.moments(1, [3], (QUERY_HEADS, DIM)).mean
    signals.fork(3, to=5)
    signals.add(1, [WatchedQueries(5, needs, 0, 9, TOKENS)], q[:9], k[:9], 1.0)
    signals.close(5)
    assert torch.equal(signals.chunk_attention(1, [3], HEADS), before[0])
    assert torch.equal(signals.moments(1, [3], (QUERY_HEADS, DIM)).mean, before[1])


def test_queries_are_looked_at_in_the_context_and_forgotten_when_no_round_can_come() -> None:
    once = EvictionPolicy(ExpectedAttention(), EqualHeads(), Keep(), When(after_prefill=True))
    again = EvictionPolicy(
        ExpectedAttention(), EqualHeads(), Keep(), When(after_prefill=True, decode_every=4)
    )
    for policy, kept in ((once, False), (again, True)):
        signals = QuerySignals(torch.device("cpu"))
        signals.rotation = ROTATION
        assert [w.count for w in note(signals, policy, 0, 50)] == [50]
        assert [w.position for w in note(signals, policy, 50, 25)] == [50]
        assert note(signals, policy, TOKENS, 1) == ()
        assert (0 in signals._sequences) is kept
