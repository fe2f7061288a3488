"""Replays that attend to their own part of the context: what they read, and that others in the batch read all."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.extension import needs_extension
from torch import Tensor

from winnow import LLM, SamplingParams
from winnow.attention import AttentionSpec, Spans, open_backend
from winnow.attention.reference import PartedStep
from winnow.cache import CacheLayout, CacheSize, LocalCache
from winnow.eviction import PRESETS, EvictionPolicy, Reconstruction, Replay
from winnow.eviction.replay import ReplayPass, ReplaySpan
from winnow.executor.attention_step import visible_blocks, with_own_parts

HEADS, DIM, SIZE = 2, 8, 4
LAYOUT = CacheLayout.even(2, HEADS, DIM, SIZE, torch.float32, num_accumulators=1)
SPEC = AttentionSpec(0.4)


def test_head_chunk_and_pass_are_visible_in_whole_blocks() -> None:
    replay = ReplayPass((), 2, 40, 61, 90, own_part=True)
    assert visible_blocks(replay, SIZE, 99).tolist() == [0, *range(10, 16), 22, 23, 24]
    assert visible_blocks(replace(replay, head=0, start=0, end=90), SIZE, 99).tolist() == list(range(25))


@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_extension)])
def test_each_part_of_a_batch_reads_what_it_should(backend: str) -> None:
    chance = torch.Generator().manual_seed(3)
    local, computes = LocalCache(LAYOUT, CacheSize.of_blocks(LAYOUT, 300, 3, 300)), open_backend(backend)
    context = {0: 57, 1: 90, 2: 33}
    counts = {0: 1, 1: 6, 2: 3}  # one decodes, two repeat their contexts, the second of them its own part
    vectors = {}
    for length in context.values():
        slot = local.ledger.open()
        k, v = torch.randn(2, length + 6, HEADS, DIM, generator=chance)
        vectors[slot] = k, v
        local.append([slot], [length])
        spans = Spans.build([slot], [0], [length], local.paged.tables.longest([slot]))
        for layer in range(2):
            computes.prepare(local.paged, spans).write(layer, k[:length], v[:length])
    slots = list(context)
    local.append(slots, list(counts.values()))
    spans = Spans.build(
        slots, list(context.values()), list(counts.values()), local.paged.tables.longest(slots)
    )
    k, v = (
        torch.cat([vectors[slot][side][context[slot] : context[slot] + counts[slot]] for slot in slots])
        for side in range(2)
    )
    q = torch.randn(len(k), 2 * HEADS, DIM, generator=chance)
    own = ReplayPass((), 2, 40, 61, 90, own_part=True)
    everything = ReplayPass((), 2, 0, 33, 33)
    replays = (ReplaySpan(1, own, slice(1, 7), 0), ReplaySpan(2, everything, slice(7, 10), 0))
    step = with_own_parts(computes, local.paged, spans, replays, {}, windowed=False)
    assert isinstance(step, PartedStep)
    assert sorted(torch.cat([tokens for tokens, _ in step.parts]).tolist()) == list(range(10))
    assert not isinstance(
        with_own_parts(computes, local.paged, spans, replays[1:], {}, windowed=False), PartedStep
    )
    for layer in range(2):
        step.write(layer, k, v)
        out = step.attend(layer, q, SPEC)
        token = 0
        for slot in slots:
            for place in range(counts[slot]):
                end = context[slot] + place + 1
                seen = np.arange(end)
                if slot == 1:
                    seen = seen[np.isin(seen // SIZE, visible_blocks(own, SIZE, 96))]
                keys, values = (side[seen] for side in vectors[slot])
                torch.testing.assert_close(out[token], by_hand(q[token], keys, values), atol=1e-5, rtol=1e-4)
                token += 1


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.view(HEADS, 2, DIM)
    p = (torch.einsum("hgd,nhd->hgn", grouped, k) * SPEC.scale).softmax(-1)
    return torch.einsum("hgn,nhd->hgd", p, v).flatten(0, 1)


def kept(policy: EvictionPolicy) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    words = " ".join(
        f"The {color} key opens door {number}." for number, color in enumerate(["red", "blue"] * 10)
    )
    with LLM(kv_memory="32MiB", eviction=policy, kv_budget=64, prefill_chunk=48) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        outputs = llm.generate([words, words + " Which?"], params)
        llm.check_integrity()
    report = outputs[0].outputs[0].eviction
    assert report is not None and report.replay_tokens > 0
    return report.kept, list(outputs[0].outputs[0].token_ids)


def test_a_part_that_is_all_of_the_context_changes_nothing() -> None:
    whole = PRESETS["kvzip"].policy
    own = replace(whole, score=Reconstruction(asked=Replay(own_part=True)))
    assert kept(own) == kept(whole)
    assert (
        kept(replace(whole, score=Reconstruction(asked=Replay(chunk=64, own_part=True))))[0] != kept(whole)[0]
    )
