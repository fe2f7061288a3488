"""The headline: answers and tokens per second by policy and amount, in the same memory, on the same prompts.

    python -m winnow_lab.papers.headline --part answers --seconds 100    # repeat: resumes cell by cell
    python -m winnow_lab.papers.headline --part speed --seconds 280      # on a quiet machine
    python -m winnow_lab.papers.headline                                 # the page of what there is
    python -m winnow_lab.papers.headline --methods full,kv-compress,snapkv-w8:pool=text,int8 --kv-budgets 64,128
    python -m winnow_lab.papers.headline --methods extreme-decode,batch-max --task gsm8k --shots 16 --new-tokens 512
    python -m winnow_lab.papers.headline --part speed --static --methods extreme-decode,batch-max --new-tokens 512

KV-Compress, figures 1, 4, 7 and 8, tables 1 and 2; Batch-Max, tables 1 and 2. A method is `full`, `int8`, or a preset
or a variant of one (winnow_lab.evaluate.variants), and options of the engine behind colons. `kv-compress` and
`kv-compress-pd` pool over text, unless they say otherwise (`kv-compress:pool=7`).
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from winnow import LLM
from winnow.cli.flags.engine import add_engine_flags, engine_options
from winnow.cli.main import Parser
from winnow.config import DTYPES, EngineConfig
from winnow.errors import ConfigError, WinnowError
from winnow.eviction import find_preset
from winnow.outputs import RequestOutput
from winnow.sampling import SamplingParams
from winnow.values.eviction_request import OWN_AMOUNT, Amount
from winnow_lab.bench.answering import answer_all, fixed_length
from winnow_lab.bench.presets import kv_memory_for
from winnow_lab.evaluate.cell import amounts_of
from winnow_lab.evaluate.variants import VARIANTS
from winnow_lab.papers.judged import AskedTask, TimedPrompt, categories_of, judge, judged_prompts
from winnow_lab.report.plots import Axis, Line as Curve, Panel, line_chart
from winnow_lab.report.tables import TextTable, formatted
from winnow_lab.study import RealModelOptions, Result, flag, run_study
from winnow_lab.study.journal import CellJournal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = "full"
METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        FULL: {"kv_reservation": "prompt"},
        "int8": {"kv_reservation": "prompt", "kv_cache_dtype": "int8"},
        "kv-compress": {"eviction": "kv-compress", "pool": "text"},
        "kv-compress-pd": {"eviction": "kv-compress-pd", "pool": "text"},
    }
)
"""Options of the engine behind names that are no preset's, or that do not stand for the preset alone."""
_USUAL = (
    *(FULL, "int8", "kv-compress", "kv-compress:pool=7", "winnow-window", "winnow-seen", "winnow-keys"),
    *("winnow-keys-pd:kv_cache_dtype=int8", "batch-max", "kv-compress-pd"),
)
_KINDS = ("niah_single_1", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "vt")
_COMPRESSIONS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_BLOCK = 8
NOTES = """\
- **right**: mean score and its standard error over prompts; the question stands last, and policies have seen it.
- **lost**: of the full cache's score on the same prompts, the mean of the differences and its standard error, in
  points. **equal** stands where it is no more than one standard error; else the loss is the claim.
- **reached**: tokens for each KV held at an answer's end.
- **tokens/s**: of prompts and answers, median over the rounds [least, most]; **gain**: over the full cache's run of the
  same round within the same KV memory, median [least, most]; **equal** stands where rounds differ in which is faster.
  **batch**: requests that got a token in a step, mean and most.
  **rounds**: part of the time that eviction took. **timed**: right and lost of the very answers that were timed, in
  memory that was short.
"""


@dataclass(frozen=True)
class Cell:
    """A method at an amount of KVs."""

    method: str
    amount: Amount = OWN_AMOUNT

    @property
    def label(self) -> str:
        return f"{self.method} {self.amount.label}".rstrip()

    @property
    def asked(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.amount).items() if value is not None}


def engine_of(method: str) -> dict[str, Any]:
    """Return the options of the engine that a method's name stands for.

    Raises:
        ConfigError: no such preset or option, or a value out of range.
    """
    name, *typed = method.split(":")
    options = dict(METHODS.get(name, {"eviction": VARIANTS.get(name, name)}))
    parser = Parser(prog="winnow run")
    add_engine_flags(parser)
    pairs = (each.partition("=") for each in typed)
    words = [f"--{option.replace('_', '-')}={value}" for option, _, value in pairs]
    try:
        options |= engine_options(parser.parse_args(words))
        if isinstance(options.get("eviction"), str):
            find_preset(options["eviction"])
    except WinnowError as error:
        raise ConfigError(f"--methods {method}: {error}") from None
    return options


@dataclass(frozen=True)
class Options(AskedTask, RealModelOptions):
    part: str = flag("page", "measured now", choices=("answers", "speed", "page"))
    contexts: tuple[int, ...] = flag(
        (2000, 3500), "tokens of a prompt, where the task leaves that free", least=500
    )
    mixed: bool = flag(False, "time prompts of all contexts together")
    static: bool = flag(
        False, "time padded batches that divide the requests, each begun when the last has ended"
    )
    compressions: tuple[float, ...] = flag((), f"(default: {_COMPRESSIONS} without --kv-budgets)", least=1)
    kv_budgets: tuple[int, ...] = flag((), "KVs kept in a row on average, in place of compressions", least=1)
    methods: tuple[str, ...] = flag(_USUAL, "full is always among them")
    kinds: tuple[str, ...] = flag((), "categories of the task (default: six of RULER's, all of others)")
    prompts: int = flag(40, "of each kind", least=_BLOCK)
    new_tokens: int = flag(500, "of timed answers", least=2)
    requests: int = flag(48, "timed together; as many as memory holds must be there", least=1)
    kv_seqs: int = flag(2, "whole sequences of the longest context that memory of timed runs holds", least=1)
    rounds: int = flag(3, "of timed runs, in turn", least=1)
    dtype: str = flag("bfloat16", "of weights and KVs", choices=DTYPES[1:])
    seed: int = flag(72, "of the prompts; policies were chosen on others")
    seconds: float = flag(float("inf"), "after which no cell begins")
    journal: Path = flag(Path("runs/headline.jsonl"), "of what was measured")

    def __post_init__(self) -> None:
        RealModelOptions.__post_init__(self)
        AskedTask.__post_init__(self)
        usual = _KINDS if self.task == "ruler" else ()
        object.__setattr__(self, "kinds", categories_of(self.task, self.kinds or usual))
        assert self.cells

    @cached_property
    def engines(self) -> dict[str, dict[str, Any]]:
        """Options of the engine, by method; the full cache comes first."""
        return {method: engine_of(method) for method in dict.fromkeys((FULL, *self.methods))}

    @cached_property
    def cells(self) -> list[Cell]:
        """Methods at every amount; one cell of those that do not evict, or decide themselves how much."""
        compressions = self.compressions or (() if self.kv_budgets else _COMPRESSIONS)
        amounts, found = amounts_of(sorted(compressions), self.kv_budgets), []
        for method, options in self.engines.items():
            eviction = options.get("eviction", FULL)
            policy = find_preset(eviction).policy if isinstance(eviction, str) else eviction
            decides = policy.when.never or policy.budget.fixed is not None
            found += [Cell(method)] if decides else [Cell(method, amount) for amount in amounts]
        return found

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Contexts whose prompts are timed together, by their name."""
        groups = [self.contexts] if self.mixed else [(each,) for each in self.contexts]
        return {"+".join(map(str, group)): group for group in groups}

    @property
    def longest(self) -> int:
        """The context whose sequences the memory of timed runs is made for: one pool for all contexts."""
        return max(self.contexts)

    def timed(self, group: str, cell: "Cell") -> str:
        """Return the name of a cell's timed rows."""
        return _name("speed", f"{self.longest}{'-static' * self.static}", group, cell.label)

    @property
    def identity(self) -> dict[str, Any]:
        names = ("task", "shots", "dtype", "new_tokens", "requests", "kv_seqs", "seed", "prompts")
        own = {name: getattr(self, name) for name in names}
        return own | {"model": Path(self.model).name, "data": self.data and str(self.data)}


def _name(*parts: Any) -> str:
    return "/".join(map(str, parts))


def _engine(options: Options, context: int, most_seqs: int) -> dict[str, Any]:
    return {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": context + options.new_tokens,
        "max_num_seqs": most_seqs,
        "enable_prefix_caching": False,
    }


Prompts = dict[tuple[int, str], list[TimedPrompt]]
"""By context and kind; they are the same for every engine of a model."""


def prompts_of(options: Options, llm: LLM, context: int, kind: str, known: Prompts) -> list[TimedPrompt]:
    """The prompts of a kind, the question last; they are made once."""
    if (context, kind) not in known:
        most = context + options.new_tokens
        found = judged_prompts(llm, options, [kind], context, options.prompts, options.seed, most)
        known[context, kind] = list(found)
        longest = max(len(each.token_ids) for each in known[context, kind])
        if longest > context:
            raise ConfigError(
                f"--contexts must be at least {longest}, the longest prompt of {kind}, got {context}"
            )
    return known[context, kind]


def answers(options: Options, journal: CellJournal, until: float) -> None:
    """Score the cells that lack, block of prompts by block, so that all cells have about as many."""
    blocks, asked = range(0, options.prompts, _BLOCK), Prompts()
    for first, context, method in product(blocks, options.contexts, options.engines):
        cells = product(options.kinds, (cell for cell in options.cells if cell.method == method))
        named = {_name("answers", context, cell.label, kind, first): (kind, cell) for kind, cell in cells}
        wanted = {name: cell for name, cell in named.items() if name not in journal.rows}
        if not wanted:
            continue
        own = _engine(options, context, _BLOCK) | {"kv_memory": "1GiB", "check": 0}
        with LLM(**own | options.engines[method]) as llm:
            for name, (kind, cell) in wanted.items():
                prompts = prompts_of(options, llm, context, kind, asked)[first : first + _BLOCK]
                journal.add(name, _scored(llm, prompts, cell.asked))
                if time.monotonic() > until:
                    return


def _scored(llm: LLM, prompts: Sequence[TimedPrompt], own: Mapping[str, Any]) -> dict[str, Any]:
    asked = [SamplingParams(temperature=0.0, max_tokens=each.asked.max_tokens, **own) for each in prompts]
    found = llm.generate([list(each.token_ids) for each in prompts], asked)
    scores = [judge(prompt.asked, each.outputs[0].text) for prompt, each in zip(prompts, found, strict=True)]
    return {"scores": [round(score, 4) for score in scores], "reached": _reached(found)}


def _reached(found: Sequence[RequestOutput]) -> float:
    evictions = [each.outputs[0].eviction for each in found]
    return statistics.fmean(each.compression if each else 1.0 for each in evictions)


def speed(options: Options, journal: CellJournal, until: float) -> None:
    """Time the cells that lack, in turn, and score these answers too."""
    asked, config = Prompts(), EngineConfig.from_options(_engine(options, options.longest, options.requests))
    memory = kv_memory_for(config, options.kv_seqs, options.longest + options.new_tokens)
    for number, group, cell in product(range(options.rounds), options.groups, options.cells):
        name, context = options.timed(group, cell), max(options.groups[group])
        if len(journal.rows.get(name, [])) > number:
            continue
        own = _engine(options, context, options.requests)
        with LLM(**own | {"kv_memory": memory} | options.engines[cell.method]) as llm:
            each_kind = product(options.groups[group], options.kinds)
            by_kind = [prompts_of(options, llm, tokens, kind, asked) for tokens, kind in each_kind]
            prompts = [each for turn in zip(*by_kind, strict=True) for each in turn][: options.requests]
            batch = static_batch(llm, prompts, options, cell, memory) if options.static else None
            journal.add(name, {**_timed(llm, prompts, options.new_tokens, cell, batch), "kv_memory": memory})
        if time.monotonic() > until:
            return


def static_batch(llm: LLM, prompts: Sequence[TimedPrompt], options: Options, cell: Cell, memory: int) -> int:
    """Return Batch-Max's batch (4.1 and appendix): the largest that divides the prompts, below the first, b0, that runs
    out of memory. Prompts of a batch are computed together, so that memory holds them whole, whatever is evicted behind
    them, unless rounds fall within them.

    Raises:
        ConfigError: memory does not hold one prompt.
    """
    eviction = options.engines[cell.method].get("eviction", FULL)
    longest = max(len(each.token_ids) for each in prompts)
    when = (find_preset(eviction).policy if isinstance(eviction, str) else eviction).when
    held = longest + options.new_tokens if when.never else longest
    if when.in_prefill:
        budget = cell.amount.kv_budget or -int(-longest // (cell.amount.compression or 4.0))
        held = min(held, budget if when.within else budget + (when.prefill_every or 0))
    most = memory // llm.kv_bytes(held)
    if not most:
        raise ConfigError(f"--kv-seqs must be such that memory holds {held} KVs a row of one prompt")
    return max(batch for batch in range(1, most + 1) if len(prompts) % batch == 0)


def _timed(
    llm: LLM, prompts: Sequence[TimedPrompt], new_tokens: int, cell: Cell, batch: int | None = None
) -> dict[str, Any]:
    """Time all prompts together; or in batches of `batch`, padded on the left to the longest."""
    llm.generate(list(prompts[0].token_ids), fixed_length(2))
    params, size = fixed_length(new_tokens, **cell.asked), batch or len(prompts)
    longest = max(len(each.token_ids) for each in prompts) if batch else 0
    asked = [
        ([*each.token_ids[:1] * (longest - len(each.token_ids)), *each.token_ids], params) for each in prompts
    ]
    runs = [answer_all(llm, asked[first : first + size]) for first in range(0, len(asked), size)]
    batches = [step.outputs for run in runs for step in run.steps if step.outputs]
    outputs, seconds = [each for run in runs for each in run.outputs], sum(run.seconds for run in runs)
    answered = [(prompt, each.outputs[0].token_ids) for prompt, each in zip(prompts, outputs, strict=True)]
    return {
        "seconds": seconds,
        "rounds": sum(run.parts["evict"] for run in runs) / seconds,
        "tokens": sum(len(each.token_ids) for each in prompts) + sum(len(answer) for _, answer in answered),
        "batch": statistics.fmean(batches),
        "most": max(batches),
        "reached": _reached(outputs),
        "preemptions": sum(run.counted("num_preemptions") for run in runs),
        "scores": [prompt.score(answer, llm.tokenizer) for prompt, answer in answered],
    }


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    spread = statistics.stdev(values) if len(values) > 1 else float("nan")
    return statistics.fmean(values), spread / len(values) ** 0.5


@dataclass(frozen=True)
class Line:
    """Measurements of one cell at one context length.

    Attributes:
        blocks: rows of answers, by kind and first prompt.
        timed: rows of the rounds.
        full: the line of the full cache; None: this is it.
    """

    blocks: Mapping[str, dict[str, Any]]
    timed: Sequence[dict[str, Any]]
    full: "Line | None" = None

    @classmethod
    def of(
        cls, options: Options, journal: CellJournal, context: str, cell: Cell, full: "Line | None" = None
    ) -> "Line":
        blocks = {}
        for kind, first in product(options.kinds, range(0, options.prompts, _BLOCK)):
            for row in journal.rows.get(_name("answers", context, cell.label, kind, first), []):
                blocks[_name(kind, first)] = row
        timed = journal.rows.get(options.timed(context, cell), [])
        return cls(blocks, timed[: options.rounds], full)

    def scores(self, kind: str = "") -> list[float]:
        rows = (row for block, row in self.blocks.items() if block.startswith(kind))
        return [each for row in rows for each in row["scores"]]

    @property
    def rates(self) -> list[float]:
        return [row["tokens"] / row["seconds"] for row in self.timed]

    @property
    def lost(self) -> str | None:
        """Return the points lost against the full cache on the same prompts, with their error."""
        theirs = self.full.blocks if self.full else {}
        return _lost(
            [(row["scores"], theirs[at]["scores"]) for at, row in self.blocks.items() if at in theirs]
        )

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
    def gains(self) -> list[float]:
        """Over the full cache's run in the same round."""
        theirs = self.full.rates if self.full else []
        return [ours / full for ours, full in zip(self.rates, theirs, strict=False)]

    @property
    def gain(self) -> float | None:
        return statistics.median(self.gains) if self.gains else None

    @property
    def gained(self) -> str | None:
        """Median, least and most; "equal" where rounds do not agree which is faster."""
        if len(self.gains) < 2:
            return formatted(self.gain, "{:.2f}x, one round")
        least, most = min(self.gains), max(self.gains)
        return "equal, " * (least <= 1.0 <= most) + f"{self.gain:.2f}x [{least:.2f}-{most:.2f}]"

    def mean_of(self, name: str) -> float | None:
        values = [row[name] for row in (*self.blocks.values(), *self.timed) if name in row]
        return statistics.fmean(values) if values else None

    @property
    def right_timed(self) -> float | None:
        scores = [each for row in self.timed for each in row["scores"]]
        return statistics.fmean(scores) if scores else None


def _lost(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> str | None:
    """The mean of paired differences, in points; "equal" within one standard error."""
    if not pairs:
        return None
    mean, error = mean_error([a - b for ours, full in pairs for a, b in zip(ours, full, strict=True)])
    return "equal, " * (mean >= -error) + f"{100 * mean:+.1f} ± {100 * error:.1f}"


_COLUMNS: Mapping[str, Callable[[Line], str | None]] = {
    "prompts": lambda line: f"{len(line.scores())}" if line.blocks else None,
    "right": lambda line: "{:.1%} ± {:.1%}".format(*mean_error(line.scores())) if line.blocks else None,
    "lost": lambda line: line.lost,
    "reached": lambda line: formatted(line.mean_of("reached"), "{:.1f}x"),
    "tokens/s": lambda line: line.rate,
    "gain": lambda line: line.gained,
    "batch": lambda line: formatted(line.mean_of("batch"), "{:.1f}"),
    "most": lambda line: formatted(line.mean_of("most"), "{:.0f}"),
    "preempted": lambda line: formatted(line.mean_of("preemptions"), "{:.0f}"),
    "rounds": lambda line: formatted(line.mean_of("rounds"), "{:.1%}"),
    "right, timed": lambda line: formatted(line.right_timed, "{:.0%}"),
    "lost, timed": lambda line: line.lost_timed,
}
_DRAWN: Mapping[str, Callable[[Line], float | None]] = {
    "right answers": lambda line: statistics.fmean(line.scores()) if line.blocks else None,
    "times the full cache's tokens/s": lambda line: line.gain,
    "requests in a step": lambda line: line.mean_of("batch"),
}


def _of_kind(kind: str) -> Callable[[Line], str | None]:
    return lambda line: f"{statistics.fmean(found):.2f}" if (found := line.scores(f"{kind}/")) else None


def lines_of(options: Options, journal: CellJournal, context: str) -> dict[Cell, Line]:
    """Return the cells of which something was measured; the full cache comes first."""
    first, *others = options.cells
    full = Line.of(options, journal, context, first)
    every = {first: full} | {each: Line.of(options, journal, context, each, full) for each in others}
    return {cell: line for cell, line in every.items() if line.blocks or line.timed}


def tables(options: Options, journal: CellJournal) -> Iterator[TextTable]:
    """Two tables by context: all kinds, and each kind's mean."""
    by_kind = {kind: _of_kind(kind) for kind in options.kinds}
    for context in options.groups:
        lines = {cell.label: line for cell, line in lines_of(options, journal, context).items()}
        if lines:
            columns = {head: read for head, read in _COLUMNS.items() if any(map(read, lines.values()))}
            yield TextTable.of(f"{context} + {options.new_tokens} tokens", "policy", lines, columns)
            if any(line.blocks for line in lines.values()):
                yield TextTable.of(f"{context} tokens: mean score by kind", "policy", lines, by_kind)


def figure(options: Options, journal: CellJournal) -> "Figure":
    """Draw answers, speed and batch by compression, a row of panels for each context."""
    panels = []
    for context, (what, read) in product(options.groups, _DRAWN.items()):
        curves: dict[str, dict[float, float]] = {}
        for cell, line in lines_of(options, journal, context).items():
            value, compression = read(line), cell.amount.compression
            if value is not None and compression is not None:
                curves.setdefault(cell.method, {})[compression] = value
        drawn = [Curve(method, list(points), list(points.values())) for method, points in curves.items()]
        panels.append(Panel(f"{context} tokens", Axis("compression", "log2"), Axis(what, low=0), drawn))
    return line_chart(panels, columns=len(_DRAWN))


def figure_by_context(options: Options, journal: CellJournal) -> "Figure":
    """Draw tokens per second and the largest batch by tokens of a prompt, a line for each cell (KV-Compress, figures 7
    and 8), as far as the memory goes that all contexts share."""
    drawn: dict[str, list[Curve]] = {"tokens/s": [], "largest batch": []}
    for cell in options.cells:
        found = {each: lines_of(options, journal, str(each)).get(cell) for each in options.contexts}
        timed = {context: line for context, line in found.items() if line is not None and line.rates}
        rates = [statistics.median(line.rates) for line in timed.values()]
        most = [line.mean_of("most") or 0.0 for line in timed.values()]
        for curves, values in zip(drawn.values(), (rates, most), strict=True):
            curves += [Curve(cell.label, list(timed), values)] if timed else []
    panels = [
        Panel("", Axis("tokens of a prompt", "log2"), Axis(what, low=0), curves)
        for what, curves in drawn.items()
    ]
    return line_chart(panels, columns=len(panels))


def study(options: Options) -> Result:
    journal, until = CellJournal(options.journal, options.identity), time.monotonic() + options.seconds
    if options.part != "page":
        {"answers": answers, "speed": speed}[options.part](options, journal, until)
    facts = [
        f"{Path(options.model).name}, {options.dtype}; seed {options.seed}.",
        f"Task {options.task}: {', '.join(options.kinds)}.",
        f"Timed: {options.requests} requests with {options.new_tokens} tokens each, KV memory of "
        f"{options.kv_seqs} whole sequences of the longest context.",
        journal.origins,
    ]
    rows = [{"cell": name, **row} for name, found in journal.rows.items() for row in found]
    more_contexts = len(options.groups) > len({cell.amount for cell in options.cells})
    draw = figure_by_context if more_contexts else figure
    drawn = {"": lambda: draw(options, journal)} if rows else {}
    return Result(
        "Answers and speed by compression",
        tuple(tables(options, journal)),
        facts,
        NOTES,
        {"rows": rows},
        figures=drawn,
    )


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
