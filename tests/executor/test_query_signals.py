"""What is learnt of queries does not depend on the pieces in which a context is computed."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from winnow.attention import AttentionSpec
from winnow.eviction import (
    ChunkProbe,
    EqualHeads,
    EvictionPolicy,
    ExpectedAttention,
    Keep,
    MomentsProbe,
    Needs,
    Probe,
    SequenceEviction,
    Signals,
    Watched,
    When,
)
from winnow.models.bind.rotation import LayerRotation, ModelRotation

HEADS, QUERY_HEADS, DIM, TOKENS = 2, 4, 6, 75
ROTATION = ModelRotation((LayerRotation(torch.tensor([1.0, 0.1]), False),) * 2)
SIGNALS = cast("Signals", SimpleNamespace(device=torch.device("cpu"), turn=ROTATION.turn))
ONCE = When(after_prefill=True)


def watched(needs: Needs, start: int, count: int, slot: int = 3, when: When = ONCE) -> Watched:
    """Tokens of a sequence behind 5 others in a batch."""
    policy = EvictionPolicy(ExpectedAttention(), EqualHeads(), Keep(), when)
    object.__setattr__(policy, "score", SimpleNamespace(needs=needs))
    return Watched(slot, SequenceEviction(policy, 10, TOKENS, TOKENS), slice(5, 5 + count), start, start)


def learnt(probe: Probe, needs: Needs, q: Tensor, k: Tensor, pieces: list[int]) -> None:
    """Show a context in pieces, in slot 3 of batches whose other tokens are noise."""
    start = 0
    for count in pieces:
        noise = torch.randn(5, QUERY_HEADS, DIM)
        seen = probe.watch(watched(needs, start, count))
        assert seen is not None
        batch_q = torch.cat([noise, q[start : start + count], noise])[seen.tokens]
        batch_k = torch.cat([noise[:, :HEADS], k[start : start + count], noise[:, :HEADS]])[seen.tokens]
        probe.at(1, seen, batch_q, batch_k, batch_k, AttentionSpec(0.5))
        start += count
    assert start == len(q)


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
    probe = MomentsProbe(SIGNALS)
    learnt(probe, Needs((MomentsProbe,), moments_from=4), q, k, pieces(seed))
    found = probe.of(1, [3], (QUERY_HEADS, DIM))
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
    probe = ChunkProbe(SIGNALS)
    learnt(probe, Needs((ChunkProbe,), chunk=chunk, chunk_from=3), q, k, pieces(seed))
    for _ in range(2):  # asking changes nothing
        found = probe.of(1, [3], HEADS)[0]
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
    moments, chunks = MomentsProbe(SIGNALS), ChunkProbe(SIGNALS)
    for probe in (moments, chunks):
        learnt(probe, needs, q, k, [TOKENS])
    before = chunks.of(1, [3], HEADS), moments.of(1, [3], (QUERY_HEADS, DIM)).mean
    saved = [probe.save(3) for probe in (moments, chunks)]
    for probe in (moments, chunks):
        probe.fork(3, to=5)
        probe.at(1, watched(needs, TOKENS, 9, slot=5), q[:9], k[:9], k[:9], AttentionSpec(1.0))
        assert probe.nbytes(3) > 0
        probe.close(5)
    assert torch.equal(chunks.of(1, [3], HEADS), before[0])
    assert torch.equal(moments.of(1, [3], (QUERY_HEADS, DIM)).mean, before[1])
    for probe, each in zip((moments, chunks), saved, strict=True):
        probe.close(3)
        probe.load(3, each)
    assert torch.equal(chunks.of(1, [3], HEADS), before[0])
    assert torch.equal(moments.of(1, [3], (QUERY_HEADS, DIM)).mean, before[1])


def test_queries_are_looked_at_in_the_context_and_forgotten_when_no_round_can_come() -> None:
    needs = Needs((MomentsProbe,), moments_from=0)
    for when, kept in ((ONCE, False), (When(after_prefill=True, decode_every=4), True)):
        probe: Any = MomentsProbe(SIGNALS)
        first, second = watched(needs, 0, 50, when=when), watched(needs, 50, 25, when=when)
        assert probe.watch(first) is first and probe.watch(second) is second
        assert probe.watch(watched(needs, TOKENS, 1, when=when)) is None
        assert (3 in probe._sequences) is kept
