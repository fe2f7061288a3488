"""Decode attention with all values and with the N that weigh most, by length: from where it is faster.

    python -m winnow_lab.memory.value_tier [--lengths 512,1024,...] [--top-n 32,64,128] [--batch 8] [--query-heads 32]
        [--kv-heads 8] [--head-dim 128] [--dtype bfloat16] [--threads 1] [--repeats 5] [--json FILE] [--page FILE]
    python -m winnow_lab.memory.value_tier --copies 1,8,512    # storing a layer's values, or having a thread do so

Layers whose values lie beside their keys and layers whose values lie apart are in one cache, larger than the
processor's caches, and measured in turn. Keys and queries are random, so that query heads of a group choose apart: the
most values are read. The model (winnow_lab.plan.value_tier, equation 3 of KCache with what finding the largest weights
costs) is fitted to four numbers: all values at the longest length, N=1 at the shortest and the longest, and the largest
N at the longest; the other rows show how it fits.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from winnow.attention import AttentionBackend, AttentionSpec, Spans, open_backend
from winnow.cache import CacheLayout, CacheSize, LocalCache
from winnow.cache.layout import ceil_div
from winnow.cli.flags.paths import write_json
from winnow.report.provenance import Machine, report_head, typed_command
from winnow.values.value_tier import ValueTier
from winnow_lab.bench.timing import interleave
from winnow_lab.papers.harness import write_page
from winnow_lab.plan.value_tier import TierModel, TierSpeeds, tier_gain
from winnow_lab.report.console import console, print_tables
from winnow_lab.report.tables import TextTable

_TIMES_CACHE, _BLOCK = 4, 16


@dataclass(frozen=True)
class Measured:
    """One length and N.

    Attributes:
        full_seconds, tiered_seconds: of a layer, medians over repeats.
        ratio: of the second to the first, the median over repeats.
        rows_per_head: values read for a query head of a group, those chosen alike counted once.
    """

    length: int
    top_n: int
    full_seconds: float
    tiered_seconds: float
    ratio: float
    rows_per_head: float


class Case:
    """A cache whose layers are alike but for where their values lie."""

    def __init__(self, arguments: argparse.Namespace, length: int, cache_bytes: int) -> None:
        self.arguments = arguments
        heads, dim, batch = arguments.kv_heads, arguments.head_dim, arguments.batch
        dtype: torch.dtype = getattr(torch, arguments.dtype)
        layer_bytes = 2 * batch * length * heads * dim * dtype.itemsize
        self.layers = max(1, ceil_div(_TIMES_CACHE * cache_bytes, layer_bytes))
        tier = ValueTier("host", layers=self.layers, top_n=1)
        layout = CacheLayout.even(
            2 * self.layers, heads, dim, _BLOCK, arguments.kv_cache_dtype or dtype, value_tier=tier
        )
        blocks = batch * layout.blocks_for(length)
        pages = batch * layout.pages_for(length)
        size = CacheSize(blocks, pages, batch, layout.pages_for(length), (blocks // 2,))
        self.local = LocalCache(layout, size)
        self.backend: AttentionBackend = open_backend("native")
        generator = torch.Generator().manual_seed(length)
        slots = [self.local.ledger.open() for _ in range(batch)]
        self.local.append(slots, [length] * batch)
        cache = self.local.paged
        for slot in slots:
            k, v = torch.randn(2, length, heads, dim, generator=generator).to(dtype)
            spans = Spans.build([slot], [0], [length], cache.tables.longest([slot]))
            for layer in range(2 * self.layers):
                self.backend.prepare(cache, spans).write(layer, k, v)
        starts = [length - 1] * batch
        self.spans = Spans.build(slots, starts, [1] * batch, cache.tables.longest(slots), select_from=starts)
        self.q = torch.randn(batch, arguments.query_heads, dim, generator=generator).to(dtype)

    def attend(self, backend: AttentionBackend, far: bool) -> None:
        """All layers of one kind."""
        for layer in range(self.layers):
            spec = AttentionSpec(self.arguments.head_dim**-0.5)
            backend.prepare(self.local.paged, self.spans).attend(layer + far * self.layers, self.q, spec)

    def of_top_n(self, top_n: int) -> AttentionBackend:
        """A backend that reads `top_n` values: what is compared shares one cache."""
        pool = self.local.paged.pool
        tier = ValueTier("host", layers=self.layers, top_n=top_n)
        for view in (pool, *pool.views):
            view.layout = replace(view.layout, value_tier=tier)
        return self.backend


def measure(
    arguments: argparse.Namespace, length: int, top_n: Sequence[int], cache_bytes: int
) -> list[Measured]:
    """All N at one length, in turn."""
    case = Case(arguments, length, cache_bytes)

    def tiered(n: int) -> None:
        case.attend(case.of_top_n(n), far=True)

    calls = [lambda: case.attend(case.backend, far=False), *(lambda n=n: tiered(n) for n in top_n)]
    full, *others = interleave(calls, arguments.repeats, torch.device("cpu"))
    found = []
    for n, seconds in zip(top_n, others, strict=True):
        traffic = case.local.paged.pool.of_layer(-1).traffic
        before = traffic.rows_read, traffic.head_queries
        tiered(n)
        rows, heads = traffic.rows_read - before[0], traffic.head_queries - before[1]
        ratio = statistics.median(b / a for a, b in zip(full, seconds, strict=True))
        medians = (statistics.median(x) / case.layers for x in (full, seconds))
        found.append(Measured(length, n, *medians, ratio, rows / heads))
    return found


def time_copies(arguments: argparse.Namespace, tokens: int) -> tuple[float, float]:
    """Seconds in which a CPU stores the values of a layer's new tokens, and in which a thread takes up a task."""
    rows = tokens * arguments.kv_heads
    v = torch.randn(rows, arguments.head_dim).to(getattr(torch, arguments.dtype))
    store, slots = v.new_zeros(max(2**16, rows), arguments.head_dim), torch.randperm(max(2**16, rows))[:rows]
    with ThreadPoolExecutor(1) as thread:
        calls = [lambda: store.index_copy_(0, slots, v), lambda: thread.submit(int).result()]
        stored, handed_over = interleave(calls, 200, torch.device("cpu"))
    return statistics.median(stored), statistics.median(handed_over)


def crossing(points: Sequence[tuple[int, float]]) -> float | None:
    """The length at which the ratio falls below 1, between those measured on a logarithmic scale; None: nowhere."""
    for (a, x), (b, y) in pairwise(points):
        if x >= 1.0 > y:
            share = math.log(x) / (math.log(x) - math.log(y))
            return math.exp(math.log(a) + share * (math.log(b) - math.log(a)))
    return float(points[0][0]) if points[0][1] < 1.0 else None


def fitted(found: Sequence[Measured], model: TierModel, batch: int) -> TierSpeeds:
    """The machine's speeds from four of the numbers."""
    by_key = {(each.length, each.top_n): each for each in found}
    short, long = min(each.length for each in found), max(each.length for each in found)
    most = max(each.top_n for each in found)
    kv = model.key_bytes + model.value_bytes
    bandwidth = batch * long * model.kv_heads * kv / by_key[long, 1].full_seconds
    fetching = by_key[long, most].tiered_seconds - by_key[long, 1].tiered_seconds
    rows = (by_key[long, most].rows_per_head - by_key[long, 1].rows_per_head) * model.query_heads
    from_host = batch * rows * model.value_bytes / max(fetching, 1e-9)
    ends = []  # seconds that finding the largest weights takes for a query head
    for length in (short, long):
        keys = length * model.kv_heads * model.key_bytes / bandwidth / model.query_heads
        value = by_key[length, 1].rows_per_head * model.value_bytes / from_host
        ends.append(by_key[length, 1].tiered_seconds / (batch * model.query_heads) - keys - value)
    per_score = (ends[1] - ends[0]) / (long - short)
    return TierSpeeds(
        bandwidth,
        1.0,
        1.0,  # prompts are not measured
        from_host,
        score_seconds=max(per_score, 0.0),
        query_seconds=max(ends[0] - per_score * short, 0.0),
        weight_bytes=0.0,
        in_place=True,
    )


def tables(
    found: Sequence[Measured], speeds: TierSpeeds, model: TierModel, batch: int
) -> tuple[list[TextTable], list[dict[str, float | int | None]]]:
    """Times and ratios by length, and where they cross."""
    lengths = list(dict.fromkeys(each.length for each in found))
    top_n = [n for n in dict.fromkeys(each.top_n for each in found) if n > 1]
    by_key = {(each.length, each.top_n): each for each in found}
    rows, crossings = [], []
    for length in lengths:
        entries = [f"{by_key[length, top_n[0]].full_seconds * 1e6:,.0f}"]
        for n in top_n:
            each = by_key[length, n]
            gain = _predicted(each, speeds, model, batch)
            entries.append(
                f"{each.tiered_seconds * 1e6:,.0f} ({each.ratio:.2f}; {gain.tiered_seconds / gain.full_seconds:.2f})"
            )
        rows.append((f"{length:,}", tuple(entries)))
    for n in top_n:
        seen = crossing([(length, by_key[length, n].ratio) for length in lengths])
        said = _predicted(by_key[lengths[-1], n], speeds, model, batch).pays_from
        crossings.append({"top_n": n, "measured_from": seen, "predicted_from": said})
    columns = ("all values, us", *(f"N={n}, us (ratio; fitted)" for n in top_n))
    cross_rows = tuple(
        (
            f"N={each['top_n']}",
            tuple(
                "never" if each[k] is None else f"{each[k]:,.0f}" for k in ("measured_from", "predicted_from")
            ),
        )
        for each in crossings
    )
    return [
        TextTable("Decode attention of a layer", "tokens", columns, tuple(rows)),
        TextTable("Faster from (tokens)", "", ("measured", "fitted"), cross_rows),
    ], crossings


def _predicted(each: Measured, speeds: TierSpeeds, model: TierModel, batch: int):  # type: ignore[no-untyped-def]
    distinct = each.rows_per_head / each.top_n
    return tier_gain(
        model, speeds, layers=0, top_n=each.top_n, length=each.length, batch=batch, distinct=distinct
    )


def main() -> None:
    """Measure, fit, show and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: tuple(int(part) for part in text.split(","))  # noqa: E731
    parser.add_argument("--lengths", type=numbers, default=(512, 1024, 2048, 4096, 8192, 16384))
    parser.add_argument("--top-n", type=numbers, default=(32, 64, 128))
    for name, default in {
        "batch": 4,
        "query-heads": 32,
        "kv-heads": 8,
        "head-dim": 128,
        "repeats": 5,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", help="how KVs are stored (default: in dtype)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--copies", type=numbers, help="tokens: time how they are stored, and nothing else")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.copies is not None:
        for tokens in arguments.copies:
            stored, handed_over = (seconds * 1e6 for seconds in time_copies(arguments, tokens))
            print(
                f"{tokens} tokens: stored in {stored:.1f} us, a thread takes a task up in {handed_over:.1f} us"
            )
        return
    machine = Machine.here(torch.device("cpu"))
    top_n = (1, *(n for n in arguments.top_n if n > 1))
    found: list[Measured] = []
    with torch.inference_mode():
        for length in arguments.lengths:
            found += measure(arguments, length, top_n, machine.last_level_cache)
    head = report_head(typed_command(), machine)
    codec = CacheLayout.even(
        1, 1, arguments.head_dim, _BLOCK, arguments.kv_cache_dtype or arguments.dtype
    ).codec
    sides = codec.key_fields(arguments.head_dim), codec.value_fields(arguments.head_dim)
    key, value = (float(sum(field.slot_bytes for field in side)) for side in sides)
    model = TierModel(1, 1, arguments.query_heads, arguments.kv_heads, 0.0, key, value)
    speeds = fitted(found, model, arguments.batch)
    shown, crossings = tables(found, speeds, model, arguments.batch)
    print_tables(console(), shown)
    facts = [
        f"Batch {arguments.batch}, {arguments.query_heads} query heads, {arguments.kv_heads} KV heads of "
        f"{arguments.head_dim}, KVs as {codec.name}, {torch.get_num_threads()} threads, blocks of "
        f"{_BLOCK} slots. Fitted: memory {speeds.bandwidth / 1e9:.1f} GB/s, gathered values "
        f"{speeds.from_host / 1e9:.1f} GB/s, {speeds.score_seconds * 1e9:.2f} ns for each weight and "
        f"{speeds.query_seconds * 1e6:.1f} us for each query head."
    ]
    print(facts[0])
    if arguments.json is not None:
        values = head | {
            "config": {
                name: value for name, value in vars(arguments).items() if name not in ("json", "page")
            },
            "speeds": {name: value for name, value in asdict(speeds).items() if value != 1.0},
            "crossings": crossings,
            "measured": [asdict(each) for each in found],
        }
        write_json(arguments.json, values)
    if arguments.page is not None:
        notes = "Ratio: time with N values by time with all; the second number is the model's.\n"
        write_page(arguments.page, "When reading few values pays on a CPU", [head], facts, notes, shown)


if __name__ == "__main__":
    main()
