"""Whether a KV should step to fewer bits before it goes: accuracy at equal bytes, with and without a narrow tier.

    python -m benchmarks.demotion [--model DIR] [--policy kvzip] [--fewer 8,16] [--tasks demo] [--categories A,...]
        [--tokens 2048] [--samples 50] [--work runs/demotion] [-o docs/results]

Evict-only keeps the best KVs in one format; a mix keeps the best of them in the first format, those after them in the
second, and the rest go (DiffKV's ladder: k=int8,v=int4, then k=int4,v=int2, then gone). All cells of a size take the
same bytes: codes, scales and position of every KV that is kept. The cache is simulated: it stores bfloat16, and after
a context is compressed each KV is replaced by what its format would decode to. Policies judge the context before the
question is seen; KVs of questions and answers stay as they are. Answers are kept below --work: the same command goes
on where it was killed.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from benchmarks.papers.page import page, results_json
from benchmarks.real_eval.work import Work
from winnow import LLM
from winnow.cache import KVCodec, codec_of
from winnow.cache.layout import IntArray
from winnow.evaluate.cell import AGNOSTIC, FULL_CELL, Cell
from winnow.evaluate.plan import EvaluationPlan
from winnow.evaluate.result import CellResult
from winnow.evaluate.runner import evaluate
from winnow.evaluate.settings import settings_for
from winnow.evaluate.tasks import load_task
from winnow.eviction import PRESETS
from winnow.eviction.evict import EvictionTarget, rank_round
from winnow.eviction.evict import evict as evict_kvs
from winnow.eviction.policy import EvictionPolicy
from winnow.eviction.ranking import Ranking
from winnow.executor import torch_executor
from winnow.report.provenance import Machine, report_head
from winnow.report.tables import TextTable

_POSITION_BYTES = 4
_LADDERS = (
    ("bfloat16",),
    ("int8",),
    ("k=int8,v=int4",),
    ("int4",),
    ("k=int4,v=int2",),
    ("int2",),
    ("int8", "int4"),
    ("k=int8,v=int4", "k=int4,v=int2"),
    ("int8", "int2"),
    ("int4", "int2"),
)
_WIDE_SHARES = (0.25, 0.5)


@dataclass(frozen=True)
class Mix:
    """What a compressed context is kept as.

    Attributes:
        formats: of the best KVs, and of those after them, if there is a second tier.
        share: of the KVs that are kept, those in the first format.
    """

    formats: tuple[str, ...]
    share: float = 1.0

    @property
    def name(self) -> str:
        if len(self.formats) == 1:
            return f"{self.formats[0]}, evict"
        return f"{self.formats[0]} {self.share:.0%}, then {self.formats[1]}"

    @property
    def codecs(self) -> tuple[KVCodec, ...]:
        return tuple(map(codec_of, self.formats))

    def kv_bytes(self, head_dim: int) -> float:
        """Bytes of a KV that is kept, on average."""
        first, *rest = (
            sum(field.slot_bytes for field in codec.fields(head_dim)) + _POSITION_BYTES
            for codec in self.codecs
        )
        return first if not rest else self.share * first + (1 - self.share) * rest[0]

    def compression(self, fewer: float, head_dim: int) -> float:
        """Tokens per KV kept for `fewer` times fewer bytes than all KVs take in bfloat16."""
        return fewer * self.kv_bytes(head_dim) / Mix(("bfloat16",)).kv_bytes(head_dim)


def mixes() -> list[list[Mix]]:
    """Evict-only formats, then ladders: no two of a list keep alike."""
    single = [Mix(formats) for formats in _LADDERS if len(formats) == 1]
    return [single, [Mix(formats, share) for formats in _LADDERS[len(single) :] for share in _WIDE_SHARES]]


class SimulatedTiers:
    """Rounds after which every KV is what its tier would decode to. `mixes` by compression."""

    def __init__(self, by_compression: dict[float, Mix]) -> None:
        self._mixes = by_compression
        self.shares: dict[str, float] = {}
        """By mix: KVs in the first format, of those kept in the last round."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Use these rounds in the executor."""
        torch_executor.evict = self._evict  # type: ignore[assignment]
        try:
            yield
        finally:
            torch_executor.evict = evict_kvs

    def _evict(
        self, cache: Any, backend: Any, policy: EvictionPolicy, members: Sequence[EvictionTarget], *rest: Any
    ) -> IntArray:
        for member in members:
            self._narrow(cache, policy, member, *rest)
        return evict_kvs(cache, backend, policy, members, *rest)

    @torch.inference_mode()
    def _narrow(
        self, cache: Any, policy: EvictionPolicy, member: EvictionTarget, signals: Any, _rotation: Any
    ) -> None:
        eviction = member.eviction
        [mix] = [m for c, m in self._mixes.items() if math.ceil(eviction.context_len / c) == eviction.target]
        ranking = rank_round(cache, policy, [member], signals)
        kept = _stay(policy, ranking, eviction.target)
        first = kept & _stay(policy, ranking, round(mix.share * eviction.target)) if mix.share < 1 else kept
        self.shares[mix.name] = float(first.sum() / kept.sum())
        for codec, tier in zip(mix.codecs, (first, kept & ~first), strict=False):
            _round_trip(cache.pool, codec, ranking.rows.slot[tier])


def _stay(policy: EvictionPolicy, ranking: Ranking, budget: int) -> Tensor:
    """The KVs that would stay with a budget: bool [L, B, H, N]."""
    rows = ranking.rows
    rows.round = replace(rows.round, budget=torch.full_like(rows.round.budget, budget))
    asked = Ranking(rows, ranking.score, ranking.must_stay, ranking.stats)
    targets = policy.budget.allot(policy.budget.costs(asked))
    stays = torch.minimum(torch.maximum(targets, asked.protected), asked.length).transpose(0, 1)
    evicted = asked.ranked.length - stays
    return rows.valid & ~asked.ranked.lowest(evicted, int(evicted.max()))


def _round_trip(pool: Any, codec: KVCodec, slot: Tensor) -> None:
    """Replace KVs by what `codec` makes of them."""
    for part in slot.split(2**16):
        place, k, v = pool.place(part), pool.keys(part), pool.values(part)
        stored = codec.encode(k, v)
        dtypes = {field.name: getattr(torch, field.dtype) for field in codec.fields(k.shape[-1])}
        fields = {name: x.to(dtypes[name]) for name, x in stored.items()}
        pool.k[place] = codec.keys(fields).to(pool.k.dtype)
        pool.v[place] = codec.values(fields).to(pool.v.dtype)


# -- measuring and writing ---------------------------------------------------------------------------------------


def measure(llm: LLM, work: Work, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a work: full cache, then every mix at every size."""
    head_dim = llm._engine._executor.layout.head_dim  # type: ignore[attr-defined]
    settings = settings_for(
        llm, samples=work.samples, tokens=(work.tokens,), categories=work.categories, seed=0
    )

    def run(cells: Sequence[Cell], name: str) -> tuple[CellResult, ...]:
        plan = EvaluationPlan(work.task, load_task(work.task), settings, tuple(cells), chat=arguments.chat)
        journal = arguments.work / f"{work.name.replace(' ', '-')}-{work.samples}-{name}.jsonl"
        return evaluate(llm, plan, journal=journal).results

    [full] = run([FULL_CELL], "full")
    rows = [_row(work, None, Mix(("bfloat16",)), full)]
    for fewer in arguments.fewer:
        for number, group in enumerate(mixes()):
            found = {mix.compression(fewer, head_dim): mix for mix in group}
            cells = [Cell(arguments.policy, compression, AGNOSTIC) for compression in found]
            tiers = SimulatedTiers(found)
            with tiers.installed():
                results = run(cells, f"{arguments.policy}-{fewer:g}-{number}")
            rows += [
                _row(work, fewer, mix, result) for mix, result in zip(found.values(), results, strict=True)
            ]
            print(
                work.name, fewer, {name: round(share, 3) for name, share in tiers.shares.items()}, flush=True
            )
    return rows


def _row(work: Work, fewer: float | None, mix: Mix, result: CellResult) -> dict[str, Any]:
    return {
        "work": work.name,
        "fewer": fewer,
        "mix": asdict(mix) if fewer else None,
        "scores": {f"{each.sample}/{each.question}": each.score for each in result.outcomes},
    }


def tables(rows: Sequence[dict[str, Any]], least: float) -> list[TextTable]:
    """Of each size: mean over works, and over each."""
    full = {row["work"]: row for row in rows if row["fewer"] is None}
    works = [work for work, row in full.items() if fmean(row["scores"].values()) >= least]
    every = [full[work] for work in works]
    lines = [("full cache", _entries(every, every))]
    shown = [TextTable("Full cache", "cell", ("mean", "less best evict-only", *works), tuple(lines))]
    for fewer in dict.fromkeys(row["fewer"] for row in rows if row["fewer"]):
        by_mix: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["fewer"] == fewer and row["work"] in works:
                by_mix.setdefault(Mix(**row["mix"]).name, []).append(row)
        single = [found for found in by_mix.values() if len(found[0]["mix"]["formats"]) == 1]
        best = max(single, key=lambda found: fmean(_means(found)))
        lines = [(name, _entries(found, best)) for name, found in by_mix.items()]
        columns = ("mean", "less best evict-only", *works)
        shown.append(TextTable(f"{fewer:g}x fewer bytes than bfloat16", "kept as", columns, tuple(lines)))
    return shown


def _means(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [fmean(row["scores"].values()) for row in rows]


def _entries(rows: Sequence[dict[str, Any]], best: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The mean over works, its difference from the best evict-only, paired by answer, and the mean of each work."""
    apart = [
        [row["scores"][name] - score for name, score in other["scores"].items() if name in row["scores"]]
        for row, other in zip(rows, best, strict=True)
    ]
    error = math.sqrt(sum(stdev(each) ** 2 / len(each) for each in apart if len(each) > 1)) / len(apart)
    change = f"{100 * fmean(map(fmean, apart)):+.1f} ± {100 * error:.1f}"
    return (f"{fmean(_means(rows)):.3f}", change, *(f"{mean:.2f}" for mean in _means(rows)))


def works(arguments: argparse.Namespace) -> list[Work]:
    """What is run: a row of the tables for each category."""
    task = load_task(arguments.task)
    categories = arguments.categories or task.categories
    return [
        Work(f"{arguments.task} {name}", arguments.task, (name,), arguments.tokens, arguments.samples)
        for name in categories
    ]


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demotion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="(default: the demo model)")
    parser.add_argument("--policy", default="kvzip", choices=sorted(PRESETS))
    parser.add_argument("--fewer", type=lambda text: tuple(map(float, _names(text))), default=(8.0, 16.0))
    parser.add_argument("--task", default="demo")
    parser.add_argument("--categories", type=_names, help="(default: all)")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=50, help="of a category")
    parser.add_argument("--chat", default="auto")
    parser.add_argument("--counts-from", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--work", type=Path, default=Path("runs/demotion"))
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    arguments.work = arguments.work / Path(arguments.model or "demo").stem
    arguments.work.mkdir(parents=True, exist_ok=True)
    policy = PRESETS[arguments.policy].policy
    with LLM(
        arguments.model,
        dtype="bfloat16",
        kv_memory=arguments.kv_memory,
        threads=arguments.threads,
        kv_floor=1,
        num_accumulators=policy.score.num_accumulators,
        max_num_seqs=16,
    ) as llm:
        rows: list[dict[str, Any]] = []
        for work in works(arguments):
            rows += measure(llm, work, arguments)
        model = Path(arguments.model or "the demo model").name
        key = f"{Path(arguments.model or 'demo').stem} {arguments.policy} {arguments.task}"
        head = report_head(["python", "-m", "benchmarks.demotion", *sys.argv[1:]], Machine.here("cpu")) | {
            "model": model,
            "policy": arguments.policy,
        }
        write(arguments.output, key, head, rows, arguments.counts_from)


def write(output: Path, key: str, head: dict[str, Any], rows: list[dict[str, Any]], least: float) -> None:
    """Put the rows beside those of other commands in demotion.json, and write demotion.md anew from all of them."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / "demotion.json"
    parts = {part["key"]: part for part in json.loads(path.read_text())["parts"]} if path.exists() else {}
    parts[key] = {"key": key, "head": head, "least": least, "rows": rows}
    path.write_text(results_json({"parts": list(parts.values())}, ("parts",)), encoding="utf-8")
    shown = []
    for part in parts.values():
        name = f"{part['head']['model']}, {part['head']['policy']}: "
        shown += [replace(table, title=name + table.title) for table in tables(part["rows"], part["least"])]
    notes = (
        "Means over categories that the full cache scores at least half of; all judged before the question is seen. "
        "The difference is paired by answer, in points ± its standard error, from the best format that only evicts.\n"
    )
    heads = [part["head"] for part in parts.values()]
    facts = ["Simulated tiers: after a context is compressed, a KV is what its format decodes to."]
    (output / "demotion.md").write_text(
        page("Demotion instead of eviction", heads, facts, notes, shown), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
