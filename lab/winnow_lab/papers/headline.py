"""The headline: answers and tokens per second by policy and compression, in the same memory, on the same prompts.

    python -m winnow_lab.papers.headline --part answers --seconds 100    # repeat: resumes cell by cell
    python -m winnow_lab.papers.headline --part speed --seconds 280      # on a quiet machine
    python -m winnow_lab.papers.headline                                 # the page of what there is

KV-Compress, figures 1, 4, 7 and 8; Batch-Max's rule and P&D eviction with their answers beside their speed.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from winnow import LLM
from winnow.config import EngineConfig
from winnow.errors import EvaluationError
from winnow.report.journal import create_journal, owner_differences, parse_object, whole_lines
from winnow.report.provenance import commit
from winnow.sampling import SamplingParams
from winnow_lab.bench.answering import answer_all, fixed_length
from winnow_lab.bench.kv_memory import kv_memory_for
from winnow_lab.papers.judged import AskedTask, TimedPrompt, judge, judged_prompts
from winnow_lab.report.tables import TextTable
from winnow_lab.study import RealModelOptions, Result, flag, run_study

FULL = "full cache"
METHODS: Mapping[str, dict[str, Any]] = {
    FULL: {"kv_reservation": "prompt"},
    "int8 KVs": {"kv_reservation": "prompt", "kv_cache_dtype": "int8"},
    "kv-compress": {"eviction": "kv-compress", "pool": "text"},
    "kv-compress, pool of 7": {"eviction": "kv-compress"},
    "winnow-seen": {"eviction": "winnow-seen"},
    "winnow-keys": {"eviction": "winnow-keys"},
    "winnow-keys-pd, int8 KVs": {"eviction": "winnow-keys-pd", "kv_cache_dtype": "int8"},
    "batch-max": {"eviction": "batch-max"},
    "kv-compress-pd": {"eviction": "kv-compress-pd", "pool": "text"},
}
"""Engines. The first two have one cell; the others one for each compression."""
KINDS = ("niah_single_1", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "vt")
_BLOCK = 8
NOTES = """\
- **right**: mean score and its standard error over prompts; the question stands last, and policies have seen it.
- **lost**: of the full cache's score on the same prompts, the mean of the differences and its standard error, in
  points. **equal** stands where it is no more than one standard error; else the loss is the claim.
- **reached**: tokens for each KV held at an answer's end.
- **tokens/s**: of prompts and answers, median over the rounds [least, most]; **gain**: over the full cache's within the
  same KV memory. Only quiet machines measured it. **batch**: requests that got a token in a step, mean and most.
  **timed**: right and lost of the very answers that were timed, in memory that was short.
"""


@dataclass(frozen=True)
class Options(RealModelOptions):
    """The grid, and which part of it is measured now."""

    part: str = flag("page", "measured now", choices=("answers", "speed", "page"))
    contexts: tuple[int, ...] = flag((2000, 3500), "tokens of a prompt", least=500)
    compressions: tuple[float, ...] = flag((2.0, 4.0, 8.0, 16.0, 32.0, 64.0), least=1)
    methods: tuple[str, ...] = flag(tuple(METHODS), choices=tuple(METHODS), read=None)
    kinds: tuple[str, ...] = flag(KINDS, "categories of RULER")
    prompts: int = flag(40, "of each kind", least=_BLOCK)
    new_tokens: int = flag(500, "of timed answers", least=2)
    requests: int = flag(24, "timed together", least=1)
    kv_seqs: int = flag(2, "whole sequences of a context that the KV memory of timed runs holds", least=1)
    rounds: int = flag(3, "of timed runs, in turn", least=1)
    seed: int = flag(72, "of the prompts; policies were chosen on others")
    seconds: float = flag(float("inf"), "after which no cell begins")
    journal: Path = flag(Path("runs/headline.jsonl"), "of what was measured")

    @property
    def cells(self) -> list[tuple[str, float]]:
        """Methods with their compressions."""
        found = product(self.methods, self.compressions)
        return [(FULL, 1.0), *((m, 1.0) for m in self.methods if m == "int8 KVs")] + [
            (method, each) for method, each in found if "eviction" in METHODS[method]
        ]


@dataclass
class Journal:
    """Rows by cell, each with its commit, on disk as they come.

    Raises:
        EvaluationError: the file is of other work.
    """

    path: Path
    identity: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            create_journal(self.path, "winnow_headline", 1, self.identity)
        with self.path.open("rb") as file:
            found = owner_differences(file.readline(), "winnow_headline", 1, self.identity)
            if found is None or found.every:
                why = "no journal of this study" if found is None else "; ".join(found.every)
                raise EvaluationError(f"--journal {self.path} is of other work: {why}")
            for row in filter(None, map(parse_object, whole_lines(file))):
                self.rows[row["cell"]] = row

    def add(self, cell: str, row: dict[str, Any]) -> None:
        """Keep a row; it survives this process."""
        where = {"commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
        self.rows[cell] = {"cell": cell, **row, **where}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[cell]) + "\n")


def _name(*parts: Any) -> str:
    return "/".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)


def engine(options: Options, method: str, context: int, timed: bool) -> LLM:
    """Open an engine: with memory for all, or where it is timed for `kv_seqs` whole sequences."""
    longest = context + options.new_tokens
    own: dict[str, Any] = {"model": options.model, "dtype": "bfloat16", "max_model_len": longest}
    own |= {"max_num_seqs": options.requests if timed else _BLOCK, "enable_prefix_caching": False}
    memory = kv_memory_for(EngineConfig.from_options(own), options.kv_seqs, longest) if timed else "1GiB"
    return LLM(**own | {"kv_memory": memory} | METHODS[method])


def prompts_of(options: Options, llm: LLM, context: int, kind: str) -> list[TimedPrompt]:
    """The prompts of a kind, the question last."""
    most = context + options.new_tokens
    each = options.prompts
    return list(judged_prompts(llm, AskedTask(task="ruler"), [kind], context, each, options.seed, most))


def amount(method: str, compression: float) -> dict[str, Any]:
    """Return the request's compression as an option; empty for a method without eviction."""
    return {"compression": compression} if "eviction" in METHODS[method] else {}


def answers(options: Options, journal: Journal, until: float) -> None:
    """Score the cells that lack, block of prompts by block, so that all cells have about as many."""
    blocks, methods = range(0, options.prompts, _BLOCK), dict.fromkeys(method for method, _ in options.cells)
    for first, context, method in product(blocks, options.contexts, methods):
        cells = product(options.kinds, (each for name, each in options.cells if name == method))
        named = {_name("answers", context, method, each, kind, first): (kind, each) for kind, each in cells}
        wanted = {name: cell for name, cell in named.items() if name not in journal.rows}
        if not wanted:
            continue
        with engine(options, method, context, False) as llm:
            for name, (kind, compression) in wanted.items():
                prompts = prompts_of(options, llm, context, kind)[first : first + _BLOCK]
                journal.add(name, _scored(llm, prompts, amount(method, compression)))
                if time.monotonic() > until:
                    return


def _scored(llm: LLM, prompts: Sequence[TimedPrompt], own: Mapping[str, Any]) -> dict[str, Any]:
    asked = [SamplingParams(temperature=0.0, max_tokens=each.asked.max_tokens, **own) for each in prompts]
    found = [each.outputs[0] for each in llm.generate([list(each.token_ids) for each in prompts], asked)]
    scores = [judge(prompt.asked, each.text) for prompt, each in zip(prompts, found, strict=True)]
    reached = statistics.fmean(each.eviction.compression if each.eviction else 1.0 for each in found)
    return {"scores": [round(score, 4) for score in scores], "reached": reached}


def speed(options: Options, journal: Journal, until: float) -> None:
    """Time the cells that lack, in turn, and score these answers too."""
    asked: dict[int, list[TimedPrompt]] = {}
    every = product(range(options.rounds), options.contexts, options.cells)
    for number, context, (method, compression) in every:
        cell = _name("speed", context, method, compression, number)
        if cell in journal.rows:
            continue
        with engine(options, method, context, True) as llm:
            if context not in asked:
                by_kind = [prompts_of(options, llm, context, kind) for kind in options.kinds]
                asked[context] = [each for turn in zip(*by_kind, strict=True) for each in turn]
            prompts = asked[context][: options.requests]
            llm.generate(list(prompts[0].token_ids), fixed_length(2))
            params = fixed_length(options.new_tokens, **amount(method, compression))
            done = answer_all(llm, [(each.token_ids, params) for each in prompts])
            batches = [step.outputs for step in done.steps if step.outputs]
            pairs = zip(prompts, done.answers, strict=True)
            row = {
                "seconds": done.seconds,
                "tokens": sum(len(each.token_ids) for each in prompts) + sum(map(len, done.answers)),
                "batch": statistics.fmean(batches),
                "most": max(batches),
                "preemptions": done.counted("num_preemptions"),
                "scores": [prompt.score(answer, llm.tokenizer) for prompt, answer in pairs],
            }
        journal.add(cell, row)
        if time.monotonic() > until:
            return


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    spread = statistics.stdev(values) if len(values) > 1 else float("nan")
    return statistics.fmean(values), spread / len(values) ** 0.5


@dataclass(frozen=True)
class Line:
    """Measurements of one method at one compression and context length.

    Attributes:
        blocks: rows of answers, by kind and first prompt.
        timed: rows of the rounds.
        full: the line of the full cache.
    """

    blocks: Mapping[str, dict[str, Any]]
    timed: Sequence[dict[str, Any]]
    full: "Line | None"

    @classmethod
    def of(cls, options: Options, journal: Journal, *cell: Any, full: "Line | None" = None) -> "Line":
        """Collect what the journal has."""

        def found(part: str, *more: tuple[Any, ...]) -> dict[str, dict[str, Any]]:
            names = {_name(*each): _name(part, *cell, *each) for each in more}
            return {short: journal.rows[name] for short, name in names.items() if name in journal.rows}

        blocks = found("answers", *product(options.kinds, range(0, options.prompts, _BLOCK)))
        timed = found("speed", *((number,) for number in range(options.rounds)))
        return cls(blocks, list(timed.values()), full)

    def scores(self, kind: str = "") -> list[float]:
        """Return the scores of all prompts, or of one kind of prompt."""
        rows = (row for block, row in self.blocks.items() if block.startswith(kind))
        return [each for row in rows for each in row["scores"]]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round."""
        return [row["tokens"] / row["seconds"] for row in self.timed]

    @property
    def lost(self) -> str | None:
        """Return the points lost against the full cache on the same prompts, with their error."""
        theirs = self.full.blocks if self.full else {}
        both = (block for block in self.blocks if block in theirs)
        return _lost([(self.blocks[block]["scores"], theirs[block]["scores"]) for block in both])

    @property
    def lost_timed(self) -> str | None:
        """The same of the answers that were timed, which are those of every round."""
        theirs = self.full.timed[:1] if self.full else []
        both = zip(self.timed, theirs, strict=False)
        return _lost([(ours["scores"], full["scores"]) for ours, full in both])

    @property
    def rate(self) -> str | None:
        """Median, least and most."""
        rates = self.rates
        return f"{statistics.median(rates):.0f} [{min(rates):.0f}-{max(rates):.0f}]" if rates else None

    @property
    def gain(self) -> str | None:
        """Over the full cache."""
        base = self.full.rates if self.full else []
        both = self.rates and base
        return f"{statistics.median(self.rates) / statistics.median(base):.2f}x" if both else None

    def mean_of(self, name: str, form: str) -> str | None:
        """The mean of a number of answers or of rounds."""
        values = [row[name] for row in (*self.blocks.values(), *self.timed) if name in row]
        return form.format(statistics.fmean(values)) if values else None

    @property
    def right_timed(self) -> str | None:
        """Mean score of the answers that were timed."""
        scores = [each for row in self.timed for each in row["scores"]]
        return f"{statistics.fmean(scores):.0%}" if scores else None


def _lost(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> str | None:
    """The mean of paired differences, in points; "equal" within one standard error."""
    if not pairs:
        return None
    mean, error = mean_error([a - b for ours, full in pairs for a, b in zip(ours, full, strict=True)])
    return "equal, " * (mean >= -error) + f"{100 * mean:+.1f} ± {100 * error:.1f}"


_COLUMNS: Mapping[str, Callable[[Line], str | None]] = {
    "prompts": lambda line: f"{len(line.scores())}",
    "right": lambda line: "{:.1%} ± {:.1%}".format(*mean_error(line.scores())) if line.blocks else None,
    "lost": lambda line: line.lost,
    "reached": lambda line: line.mean_of("reached", "{:.1f}x"),
    "tokens/s": lambda line: line.rate,
    "gain": lambda line: line.gain,
    "batch": lambda line: line.mean_of("batch", "{:.1f}"),
    "most": lambda line: line.mean_of("most", "{:.0f}"),
    "preempted": lambda line: line.mean_of("preemptions", "{:.0f}"),
    "right, timed": lambda line: line.right_timed,
    "lost, timed": lambda line: line.lost_timed,
}


def _of_kind(kind: str) -> Callable[[Line], str | None]:
    return lambda line: f"{statistics.fmean(found):.2f}" if (found := line.scores(f"{kind}/")) else None


def tables(options: Options, journal: Journal) -> Iterator[TextTable]:
    """Two tables by context: all kinds, and each kind's mean."""
    for context in options.contexts:
        full = Line.of(options, journal, context, FULL, 1.0)
        every = {
            _shown(*cell): Line.of(options, journal, context, *cell, full=full) for cell in options.cells[1:]
        }
        lines = {name: line for name, line in every.items() if line.blocks or line.timed}
        if full.blocks or full.timed:
            lines = {FULL: full} | lines
            yield TextTable.of(f"{context} + {options.new_tokens} tokens", "policy", lines, _COLUMNS)
            by_kind = {kind: _of_kind(kind) for kind in options.kinds}
            yield TextTable.of(f"{context} tokens: mean score by kind", "policy", lines, by_kind)


def _shown(method: str, compression: float) -> str:
    return f"{method} {compression:g}x" if "eviction" in METHODS[method] else method


def study(options: Options) -> Result:
    """Measure the part that is asked for, and show all there is."""
    names = ("new_tokens", "requests", "kv_seqs", "seed", "prompts")
    identity = {name: getattr(options, name) for name in names} | {"model": Path(options.model).name}
    journal, until = Journal(options.journal, identity), time.monotonic() + options.seconds
    if options.part != "page":
        {"answers": answers, "speed": speed}[options.part](options, journal, until)
    commits = sorted({str(row["commit"]) for row in journal.rows.values()})
    dates = sorted({row["date"] for row in journal.rows.values()})
    facts = [
        f"{identity['model']}, bfloat16, RULER: {', '.join(options.kinds)}; seed {options.seed}.",
        f"Timed: {options.requests} requests with {options.new_tokens} tokens each, KV memory of "
        f"{options.kv_seqs} whole sequences.",
        *(f"Measured at commit {each}." for each in commits),
        f"Dates: {', '.join(dates)}.",
    ]
    return Result(
        "Answers and speed by compression",
        tuple(tables(options, journal)),
        facts,
        NOTES,
        {"rows": list(journal.rows.values())},
    )


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
