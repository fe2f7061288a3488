"""The reference backend against the formula, one query and one head at a time."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor

from winnow.attention import (
    AttentionObserver,
    AttentionSpec,
    Group,
    PagedCache,
    ReferenceBackend,
    Smoothing,
    Spans,
    Term,
    gathered_rows,
)
from winnow.cache import CacheLayout, CacheSize, KVPool, LocalCache

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


def build(
    seed: int,
    counts: list[int],
    heads: int,
    group: int,
    num_accumulators: int,
    dtype: torch.dtype,
    observe: AttentionObserver | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Case:
    kv_dtype = kv_dtype or dtype
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = sorted(counts, key=lambda n: n > 1)  # decodes first
    layout = CacheLayout.even(LAYERS, heads, DIM, BLOCK, kv_dtype, num_accumulators)
    local = LocalCache(layout, CacheSize.fit(layout, 2**20, 8, 300))
    cache, ledger = local.paged, local.ledger
    pool, tables = cache.pool, cache.tables
    # what a row never wrote may be anything, also not a number
    pool.of_layer(-1).k.fill_(math.nan)
    pool.of_layer(-1).v.fill_(math.nan)
    backend = ReferenceBackend()
    slots, starts, rows = [], [], []
    for count in counts:
        slot = ledger.open()
        start = int(rng.integers(0, 60))
        if start:
            local.append([slot], [start])
        # Rows after some eviction: every layer and head holds another number of KVs, at increasing positions.
        kept = rng.integers(0, start + 1, size=(LAYERS, heads), dtype=np.int32)
        tables.set_lengths(np.array([slot]), kept[None])
        ledger.lengths[slot] = kept
        heads_rows = []
        for head in range(heads):
            n = int(kept[LAYER, head])
            positions = np.sort(rng.choice(start, size=n, replace=False)) if n else []
            row = [(int(p), randn(DIM).to(kv_dtype), randn(DIM).to(kv_dtype)) for p in positions]
            blocks = tables.lookup(torch.tensor([slot]), LAYER, max(1, -(-start // BLOCK)))[0, head]
            for i, (position, k, v) in enumerate(row):
                place = (int(blocks[i // BLOCK]), i % BLOCK)
                pool.of_layer(-1).k[place], pool.of_layer(-1).v[place], pool.position[place] = k, v, position
                pool.accumulators[(slice(None), *place)] = 0.0
            heads_rows.append(row)
        local.append([slot], [count])
        slots.append(slot)
        starts.append(start)
        rows.append(heads_rows)
    total = sum(counts)
    spans = Spans.build(
        slots,
        starts,
        counts,
        tables.longest(slots),
        observe=[observe] * len(slots),
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
    backend.prepare(cache, spans).write(LAYER, case.k, case.v)
    token = 0
    for sequence, count in enumerate(counts):
        for i in range(count):
            for head in range(heads):
                k, v = case.k[token, head].to(kv_dtype), case.v[token, head].to(kv_dtype)
                case.rows[sequence][head].append((starts[sequence] + i, k, v))
            token += 1
    return case


@dataclass
class Seen:
    """What one query head of one query saw of one KV."""

    weight: float
    average: float  # 1 / (KVs the query sees)


# What attention does for one KV, by query and query head of its group.
Observed = dict[
    tuple[int, int, int], dict[int, dict[int, Seen]]
]  # (sequence, head, index) -> query -> query head


def sees(at: int, position: int, window: int, chunked: bool) -> bool:
    return at // window == position // window if chunked else at - position < window


def naive(case: Case, spec: AttentionSpec, exclude_first: int = 0) -> tuple[Tensor, Observed]:
    """Outputs, and what every query that counts saw of every KV."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    observed: Observed = {}
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
                    if p <= at and (spec.window is None or sees(at, p, spec.window, spec.chunked))
                ]
                logits = [float(case.q[token, query_head].double() @ k) * spec.scale for _, _, k, _ in seen]
                if spec.softcap is not None:
                    logits = [spec.softcap * math.tanh(x / spec.softcap) for x in logits]
                if spec.slopes is not None:
                    fall = float(spec.slopes[query_head])
                    logits = [x - fall * (at - p) for x, (_, p, _, _) in zip(logits, seen, strict=True)]
                extra = [] if spec.sinks is None else [float(spec.sinks[query_head])]
                total = sum(math.exp(x) for x in [*logits, *extra])
                weights = [math.exp(x) / total for x in logits]
                for (_, _, _, v), weight in zip(seen, weights, strict=True):
                    out[token, query_head] += weight * v
                for (i, p, _, _), weight in zip(seen, weights, strict=True):
                    if at >= case.spans.observe_from[sequence] and at - p >= exclude_first:
                        heads = observed.setdefault((sequence, head, i), {}).setdefault(token, {})
                        heads[query_head] = Seen(weight, 1 / len(seen))
            token += 1
    return out, observed


def told(term: Term, seen: Seen) -> float:
    match term:
        case Term.ATTENTION:
            return seen.weight
        case Term.SQUARED:
            return seen.weight**2
        case Term.BELOW_AVERAGE:
            return float(seen.weight < seen.average)


def aggregate(group: Group, values: list[float]) -> float:
    if group is Group.MAX:
        return max(values)
    return sum(values) / (len(values) if group is Group.MEAN else 1)


def naive_score(term: Term, group: Group, replace: bool, queries: dict[int, dict[int, Seen]]) -> float:
    """The sum of what queries told about one KV."""
    by_query = [[told(term, seen) for seen in heads.values()] for heads in queries.values()]
    if group is Group.MAX and replace:
        return max((sum(column) for column in zip(*by_query, strict=True)), default=0.0)
    return sum(aggregate(group, heads) for heads in by_query)


def scores(case: Case) -> dict[tuple[int, int, int, int], float]:
    """What the pool holds, in the form of `naive`."""
    found = {}
    for sequence, slot in enumerate(case.spans.slots.tolist()):
        for head, row in enumerate(case.rows[sequence]):
            tables = case.cache.tables.lookup(torch.tensor([slot]), LAYER, -(-len(row) // BLOCK))[0, head]
            for i in range(len(row)):
                for n, score in enumerate(case.cache.pool.accumulators):
                    found[n, sequence, head, i] = float(score[int(tables[i // BLOCK]), i % BLOCK])
    return found


@example(  # a window of one KV, which takes all attention
    seed=2,
    counts=[1, 1, 2],
    heads=1,
    group=4,
    window=1,
    chunked=False,
    softcap=None,
    with_sinks=False,
    with_slopes=False,
    terms=(Term.ATTENTION,),
    aggregation=Group.SUM,
    exclude_first=0,
    replace=False,
    small_temporaries=False,
)
@given(
    seed=st.integers(0, 2**31),
    counts=st.lists(st.one_of(st.just(1), st.integers(2, 20)), min_size=1, max_size=6),
    heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    softcap=st.one_of(st.none(), st.just(1.5)),
    chunked=st.booleans(),
    with_sinks=st.booleans(),
    with_slopes=st.booleans(),
    terms=st.sampled_from([*((term,) for term in Term), (Term.ATTENTION, Term.SQUARED)]),
    aggregation=st.sampled_from(Group),
    exclude_first=st.sampled_from([0, 1, 5]),
    replace=st.booleans(),
    small_temporaries=st.booleans(),
)
def test_equals_the_formula(
    seed: int,
    counts: list[int],
    heads: int,
    group: int,
    window: int | None,
    chunked: bool,
    softcap: float | None,
    with_sinks: bool,
    with_slopes: bool,
    terms: tuple[Term, ...],
    aggregation: Group,
    exclude_first: int,
    replace: bool,
    small_temporaries: bool,
) -> None:
    observe = AttentionObserver(terms, aggregation, exclude_first, replace)
    case = build(seed, counts, heads, group, len(terms), torch.float32, observe)
    before = 0.25  # what the scores held, which only replacing takes away
    case.cache.pool.accumulators.fill_(before)
    sinks = torch.linspace(-1, 1, heads * group) if with_sinks else None
    slopes = 0.5 ** torch.arange(heads * group) if with_slopes else None
    with pytest.MonkeyPatch.context() as patch:
        if small_temporaries:  # every group and every block of queries is cut
            patch.setattr(gathered_rows, "TEMPORARY", 200)
        spec = AttentionSpec(0.3, window, softcap, sinks, slopes, chunked and window is not None)
        out = ReferenceBackend().prepare(case.cache, case.spans).attend(LAYER, case.q, spec)
    expected, observed = naive(case, spec, exclude_first)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    found = scores(case)
    for (n, *kv), value in found.items():
        added = naive_score(terms[n], aggregation, replace, observed.get(tuple(kv), {}))
        assert value == pytest.approx(added + (0.0 if replace else before), rel=1e-3, abs=1e-4), (n, kv)


@given(
    seed=st.integers(0, 2**31),
    group=st.sampled_from([1, 2]),
    aggregation=st.sampled_from(Group),
    size=st.sampled_from([1, 3, 7]),
    kind=st.sampled_from(["max", "average"]),
    per_query_head=st.booleans(),
    skip_window=st.booleans(),
)
def test_pooling_smooths_over_neighbours_in_position(
    seed: int, group: int, aggregation: Group, size: int, kind: str, per_query_head: bool, skip_window: bool
) -> None:
    pool = Smoothing(size, kind, per_query_head, skip_window)
    observe = AttentionObserver((Term.ATTENTION,), aggregation, replace=True, smoothing=pool)
    heads, half = 2, size // 2
    case = build(seed, [6, 1], heads, group, 1, torch.float32, observe)
    ReferenceBackend().prepare(case.cache, case.spans).attend(LAYER, case.q, AttentionSpec(0.3))
    _, observed = naive(case, AttentionSpec(0.3))
    found = scores(case)
    for sequence in range(2):
        first = int(case.spans.observe_from[sequence])
        for head in range(heads):
            row = case.rows[sequence][head]
            pooled = [i for i in range(len(row)) if not skip_window or row[i][0] < first]
            pooled.sort(key=lambda i: row[i][0])

            def total(query_head: int, i: int, at: tuple[int, int] = (sequence, head)) -> float:
                queries = observed.get((*at, i), {})
                return sum(h[query_head].weight for h in queries.values() if query_head in h)

            def smooth(values: list[float]) -> list[float]:
                cut = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
                return [max(part) if kind == "max" else sum(part) / size for part in cut]

            by_head = [[total(h, i) for i in pooled] for h in range(head * group, (head + 1) * group)]
            if per_query_head:
                expected = [aggregate(aggregation, list(c)) for c in zip(*map(smooth, by_head), strict=True)]
            else:
                expected = smooth([aggregate(aggregation, list(c)) for c in zip(*by_head, strict=True)])
            for i, value in zip(pooled, expected, strict=True):
                assert found[0, sequence, head, i] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_its_output(dtype: torch.dtype) -> None:
    case = build(3, [1, 1, 7], 2, 2, 0, dtype)
    out = ReferenceBackend().prepare(case.cache, case.spans).attend(LAYER, case.q, AttentionSpec(0.3))
    expected, _ = naive(case, AttentionSpec(0.3))
    assert out.dtype == dtype
    assert torch.allclose(out.double(), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_activations_and_kvs_may_differ_in_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """KVs are read as they were stored, not as the activations would round them, and only the output is rounded."""
    case = build(3, [1, 1, 7], 2, 2, 1, dtype, AttentionObserver(), kv_dtype)
    out = ReferenceBackend().prepare(case.cache, case.spans).attend(LAYER, case.q, AttentionSpec(0.3))
    expected, observed = naive(case, AttentionSpec(0.3))
    assert (out.dtype, case.cache.pool.of_layer(-1).k.dtype) == (dtype, kv_dtype)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-7, 1e-3)
    assert torch.allclose(out.double(), expected, rtol=rtol, atol=atol)
    for (n, *kv), value in scores(case).items():
        added = naive_score(Term.ATTENTION, Group.SUM, False, observed.get(tuple(kv), {}))
        assert n == 0 and value == pytest.approx(added, rel=1e-5, abs=1e-6)


def test_without_observe_scores_stay() -> None:
    case = build(5, [1, 4], 2, 2, 1, torch.float32)
    ReferenceBackend().prepare(case.cache, case.spans).attend(LAYER, case.q, AttentionSpec(0.3))
    assert set(scores(case).values()) == {0.0}


def test_pooling_needs_all_queries_at_once() -> None:
    with pytest.raises(ValueError, match="replace must be True"):
        AttentionObserver(smoothing=Smoothing(7))


def test_compact_moves_all_of_a_kv() -> None:
    layout = CacheLayout.even(1, 1, DIM, BLOCK, torch.float32, num_accumulators=2)
    pool = KVPool(layout, 6)
    pool.of_layer(-1).k.normal_()
    pool.of_layer(-1).v.normal_()
    pool.position.copy_(torch.arange(24).view(6, 4))
    pool.accumulators.normal_()
    before = [
        pool.of_layer(-1).k.clone(),
        pool.of_layer(-1).v.clone(),
        pool.position.clone(),
        pool.accumulators.clone(),
    ]
    source, target = torch.tensor([23, 9]), torch.tensor([0, 5])
    ReferenceBackend().compact(pool, source, target)
    for field, old in zip([pool.of_layer(-1).k, pool.of_layer(-1).v], before[:2], strict=True):
        assert torch.equal(field.flatten(0, 1)[target], old.flatten(0, 1)[source])
    assert pool.position.flatten()[target].tolist() == [23, 9]
    assert torch.equal(pool.accumulators.flatten(1)[:, target], before[3].flatten(1)[:, source])
    untouched = [i for i in range(24) if i not in (0, 5)]
    assert torch.equal(pool.of_layer(-1).k.flatten(0, 1)[untouched], before[0].flatten(0, 1)[untouched])
