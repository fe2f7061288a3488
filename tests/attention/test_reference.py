"""The reference backend against the formula, one query and one head at a time."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from winnow.attention import AttentionSpec, Observe, PagedCache, ReferenceBackend, Spans
from winnow.attention import reference as reference_module
from winnow.cache import CacheLayout, CacheManager, CacheSize, KVPool

LAYERS, DIM, BLOCK = 2, 8, 4
LAYER = 1


@dataclass
class Case:
    """A cache whose rows differ in length, and a packed batch over it."""

    cache: PagedCache
    spans: Spans
    q: Tensor  # [T, Hq, d]
    k: Tensor  # [T, H, d], the batch's own
    v: Tensor
    rows: list[
        list[list[tuple[int, Tensor, Tensor]]]
    ]  # per sequence and head: (position, k, v), in slot order


def build(seed: int, counts: list[int], heads: int, group: int, num_scores: int, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = sorted(counts, key=lambda n: n > 1)  # decodes first
    layout = CacheLayout(LAYERS, heads, DIM, BLOCK, dtype, num_scores)
    manager = CacheManager(layout, CacheSize.fit(layout, 2**20, 8, 300))
    pool = KVPool(layout, manager.size.num_blocks)
    # what a row never wrote may be anything, also not a number
    pool.k.fill_(math.nan)
    pool.v.fill_(math.nan)
    backend, cache = ReferenceBackend(), PagedCache(pool, manager)
    slots, starts, rows = [], [], []
    for count in counts:
        slot = manager.open()
        start = int(rng.integers(0, 60))
        if start:
            manager.append([slot], [start])
        # Rows after some eviction: every layer and head holds another number of KVs, at increasing positions.
        kept = rng.integers(0, start + 1, size=(LAYERS, heads), dtype=np.int32)
        manager.host_lengths[slot] = kept
        manager.lengths[slot] = torch.from_numpy(kept)
        heads_rows = []
        for head in range(heads):
            n = int(kept[LAYER, head])
            positions = np.sort(rng.choice(start, size=n, replace=False)) if n else []
            row = [(int(p), randn(DIM), randn(DIM)) for p in positions]
            blocks = manager.tables.lookup(torch.tensor([slot]), LAYER, max(1, -(-start // BLOCK)))[0, head]
            for i, (position, k, v) in enumerate(row):
                place = (int(blocks[i // BLOCK]), i % BLOCK)
                pool.k[place], pool.v[place], pool.position[place] = k, v, position
                pool.score[(slice(None), *place)] = 0.0
            heads_rows.append(row)
        manager.append([slot], [count])
        slots.append(slot)
        starts.append(start)
        rows.append(heads_rows)
    total = sum(counts)
    spans = Spans.build(
        slots,
        starts,
        counts,
        manager.host_lengths[slots].max(axis=(1, 2)).astype(np.int64),
        observe_from=[s + c // 2 for s, c in zip(starts, counts, strict=True)],
    )
    case = Case(
        cache,
        spans,
        randn(total, heads * group, DIM),
        randn(total, heads, DIM),
        randn(total, heads, DIM),
        rows,
    )
    backend.write(cache, spans, LAYER, case.k, case.v)
    token = 0
    for sequence, count in enumerate(counts):
        for i in range(count):
            for head in range(heads):
                case.rows[sequence][head].append(
                    (starts[sequence] + i, case.k[token, head], case.v[token, head])
                )
            token += 1
    return case


def naive(
    case: Case,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    observe: Observe,
) -> tuple[Tensor, dict[tuple[int, int, int, int], float]]:
    """Outputs, and per (score, sequence, head, index in the row) what the batch adds."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    added: dict[tuple[int, int, int, int], float] = {}
    group = case.q.shape[1] // case.k.shape[1]
    token = 0
    for sequence, count in enumerate(case.spans.counts.tolist()):
        for _ in range(count):
            at = int(case.spans.position[token])
            for query_head in range(case.q.shape[1]):
                head = query_head // group
                seen = [
                    (i, p, k.double(), v.double())
                    for i, (p, k, v) in enumerate(case.rows[sequence][head])
                    if p <= at and (window is None or at - p < window)
                ]
                logits = [float(case.q[token, query_head].double() @ k) * scale for _, _, k, _ in seen]
                if softcap is not None:
                    logits = [softcap * math.tanh(x / softcap) for x in logits]
                extra = [] if sinks is None else [float(sinks[query_head])]
                total = sum(math.exp(x) for x in [*logits, *extra])
                for (i, p, _, v), logit in zip(seen, logits, strict=True):
                    weight = math.exp(logit) / total
                    out[token, query_head] += weight * v
                    if at >= case.spans.observe_from[sequence] and at - p >= observe.exclude_first:
                        for n, power in enumerate(observe.powers):
                            key = (n, sequence, head, i)
                            added[key] = added.get(key, 0.0) + weight**power
            token += 1
    return out, added


def scores(case: Case) -> dict[tuple[int, int, int, int], float]:
    """What the pool holds, in the form of `naive`."""
    found = {}
    for sequence, slot in enumerate(case.spans.slots.tolist()):
        for head, row in enumerate(case.rows[sequence]):
            tables = case.cache.manager.tables.lookup(torch.tensor([slot]), LAYER, -(-len(row) // BLOCK))[
                0, head
            ]
            for i in range(len(row)):
                for n, score in enumerate(case.cache.pool.score):
                    found[n, sequence, head, i] = float(score[int(tables[i // BLOCK]), i % BLOCK])
    return found


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    counts=st.lists(st.one_of(st.just(1), st.integers(2, 20)), min_size=1, max_size=6),
    heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    softcap=st.one_of(st.none(), st.just(1.5)),
    with_sinks=st.booleans(),
    powers=st.sampled_from([(1,), (2,), (1, 2)]),
    exclude_first=st.sampled_from([0, 1, 5]),
    small_temporaries=st.booleans(),
)
def test_equals_the_formula(
    seed: int,
    counts: list[int],
    heads: int,
    group: int,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    powers: tuple[int, ...],
    exclude_first: int,
    small_temporaries: bool,
) -> None:
    case = build(seed, counts, heads, group, len(powers), torch.float32)
    sinks = torch.linspace(-1, 1, heads * group) if with_sinks else None
    observe = Observe(powers, exclude_first)
    with pytest.MonkeyPatch.context() as patch:
        if small_temporaries:  # every group and every block of queries is cut
            patch.setattr(reference_module, "_TEMPORARY", 200)
        spec = AttentionSpec(0.3, window, softcap, sinks)
        out = ReferenceBackend().attend(case.cache, case.spans, LAYER, case.q, spec, observe)
    expected, added = naive(case, 0.3, window, softcap, sinks, observe)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    found = scores(case)
    assert found.keys() >= added.keys()
    for key, value in found.items():
        assert value == pytest.approx(added.get(key, 0.0), abs=1e-5), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_its_output(dtype: torch.dtype) -> None:
    case = build(3, [1, 1, 7], 2, 2, 0, dtype)
    out = ReferenceBackend().attend(case.cache, case.spans, LAYER, case.q, AttentionSpec(0.3))
    expected, _ = naive(case, 0.3, None, None, None, Observe(()))
    assert out.dtype == dtype
    assert torch.allclose(out.double(), expected, rtol=2**-7, atol=1e-3)


def test_without_observe_scores_stay() -> None:
    case = build(5, [1, 4], 2, 2, 1, torch.float32)
    ReferenceBackend().attend(case.cache, case.spans, LAYER, case.q, AttentionSpec(0.3))
    assert set(scores(case).values()) == {0.0}


def test_compact_moves_all_of_a_kv() -> None:
    layout = CacheLayout(1, 1, DIM, BLOCK, torch.float32, num_scores=2)
    pool = KVPool(layout, 6)
    pool.k.normal_()
    pool.v.normal_()
    pool.position.copy_(torch.arange(24).view(6, 4))
    pool.score.normal_()
    before = [pool.k.clone(), pool.v.clone(), pool.position.clone(), pool.score.clone()]
    source, target = torch.tensor([23, 9]), torch.tensor([0, 5])
    ReferenceBackend().compact(pool, source, target)
    for field, old in zip([pool.k, pool.v], before[:2], strict=True):
        assert torch.equal(field.flatten(0, 1)[target], old.flatten(0, 1)[source])
    assert pool.position.flatten()[target].tolist() == [23, 9]
    assert torch.equal(pool.score.flatten(1)[:, target], before[3].flatten(1)[:, source])
    untouched = [i for i in range(24) if i not in (0, 5)]
    assert torch.equal(pool.k.flatten(0, 1)[untouched], before[0].flatten(0, 1)[untouched])
