"""BATON, section 5: two sets of queries, the modes that answer them, and how they are measured."""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import accumulate, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from winnow.cli.flags.engine import open_llm
from winnow.config import EngineConfig, EvictionConfig
from winnow.config.model import PAGED
from winnow.errors import ConfigError
from winnow.llm import LLM
from winnow.outputs import EngineStats
from winnow_lab.bench.answering import Step, answer_all, fixed_length
from winnow_lab.bench.traces import TraceRequest, read_trace, scaled
from winnow_lab.evaluate.tasks.files import shipped_sentences
from winnow_lab.padded.options import PaddedOptions
from winnow_lab.padded.stats import PaddedStats
from winnow_lab.study import EngineOptions, flag
from winnow_lab.study.journal import CellJournal

MIXED, SHORT, TRACED = "mixed", "short", "trace"
SETS = (MIXED, SHORT, TRACED)

Words = tuple[int, int]
"""Fewest and most words of a text; lengths between are drawn evenly."""

LONG_WORDS: Words = (3600, 4400)
"""\"around 4,000\", in the mixed set."""
SHORT_WORDS: Words = (24, 400)
"""\"a few dozen to 400\", in the mixed set."""
SHORT_SET_WORDS: Words = (24, 200)
"""\"a few dozen to 200\", prompts and answers of the short set."""
DOUBLED_BATCH = 4
"""With this batch size every length of the mixed set is doubled (5.2.1)."""

_SECONDS: Mapping[str, Mapping[str, Mapping[int, float]]] = MappingProxyType(
    {
        MIXED: {
            "static": {4: 21901, 8: 6619},
            "pd": {4: 21781, 8: 6577},
            "shaping-gaps": {4: 20549, 8: 3424},
            "embedding": {4: 11771, 8: 2654},
        },
        # Its method is named as the one without P&D in Table 1; the text does not tell which of the two it is.
        SHORT: {
            "static": {2: 161.77, 4: 92.68, 6: 61.70, 8: 50.07, 10: 40.45},
            "shaping-gaps": {2: 83.43, 4: 49.61, 6: 37.25, 8: 31.08, 10: 30.99},
            "embedding": {2: 83.43, 4: 49.61, 6: 37.25, 8: 31.08, 10: 30.99},
        },
    }
)


def published_batches(query_set: str) -> tuple[int, ...]:
    """The batch sizes that the paper measured; of a trace those of its mixed set."""
    return tuple(_SECONDS.get(query_set, _SECONDS[MIXED])["static"])


def published_gain(query_set: str, mode: str, batch: int) -> float | None:
    """How many times faster than static batches a mode was in the paper; None where it was not measured."""
    seconds = _SECONDS.get(query_set, {})
    ours, theirs = (seconds.get(each, {}).get(batch) for each in (mode, "static"))
    return None if ours is None or theirs is None else theirs / ours


_MIXED_QUARTER, _SHORT_QUERIES = 30, 30
_LEAST_TOKENS = 2


@dataclass(frozen=True)
class Lengths:
    prompt: int
    answer: int

    @property
    def total(self) -> int:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Query:
    """A prompt, and how many tokens its answer has: the end of text does not end it, so all modes do the same work."""

    token_ids: tuple[int, ...]
    answer_tokens: int


def draw_lengths(query_set: str, batch: int, scale: float, seed: int) -> list[Lengths]:
    """Lengths of a set's queries, in the order in which they are submitted.

    mixed: 120 queries; long prompt and short answer, short and long, short and short as 1:1:2, in random order.
    short: 30 queries, both short. With batch 4 the mixed set's lengths are doubled, else the batch changes nothing.

    Args:
        scale: tokens for each of the paper's words.
    """
    rng = random.Random(f"{query_set}/{seed}")
    factor = scale * (2 if query_set == MIXED and batch == DOUBLED_BATCH else 1)
    kinds: list[tuple[Words, Words]]
    if query_set == MIXED:
        short = (SHORT_WORDS, SHORT_WORDS)
        kinds = [(LONG_WORDS, SHORT_WORDS), (SHORT_WORDS, LONG_WORDS), short, short] * _MIXED_QUARTER
        rng.shuffle(kinds)
    else:
        kinds = [(SHORT_SET_WORDS, SHORT_SET_WORDS)] * _SHORT_QUERIES

    def tokens(words: Words) -> int:
        return max(round(rng.randint(*words) * factor), _LEAST_TOKENS)

    return [Lengths(tokens(prompt), tokens(answer)) for prompt, answer in kinds]


def with_text(lengths: Sequence[Lengths], text: Sequence[int], first: int | None, seed: int) -> list[Query]:
    """Queries whose prompts are passages of `text`, each from a place of its own.

    Args:
        text: token ids; where a passage would end behind it, it continues from the beginning.
        first: the token that begins every prompt, if the model has one.
    """
    rng = random.Random(f"text/{seed}")
    begin = () if first is None else (first,)
    queries = []
    for each in lengths:
        start, count = rng.randrange(len(text)), each.prompt - len(begin)
        passage = tuple(text[(start + number) % len(text)] for number in range(count))
        queries.append(Query((*begin, *passage), each.answer))
    return queries


MODES = ("static", "pd", "shaping-gaps", "shaping", "embedding", PAGED)


@dataclass(frozen=True)
class Cell:
    """One set of queries, answered by one mode at one batch size."""

    query_set: str
    mode: str
    batch: int

    def options(self, given: Mapping[str, Any], padded: str = "") -> dict[str, Any]:
        """Return the engine's, of those given; `padded` are further ones of padded engines, such as park_above=0.5."""
        own = ",".join(filter(None, (f"mode={self.mode}", padded)))
        engine = PAGED if self.mode == PAGED else f"padded:{own}"
        return {"dtype": "float32", **given, "max_num_seqs": self.batch, "engine": engine}

    @property
    def key(self) -> str:
        return f"{self.query_set}/{self.batch}/{self.mode}"

    @classmethod
    def of(cls, key: str) -> "Cell":
        query_set, batch, mode = key.split("/")
        return cls(query_set, mode, int(batch))


@dataclass(frozen=True)
class Options(EngineOptions):
    sets: tuple[str, ...] = flag(
        (MIXED, SHORT),
        "mixed: 120 queries, long and short; short: 30 queries; trace: those of --trace",
        choices=SETS,
    )
    trace: Path | None = flag(
        None, "of Azure (.csv) or Mooncake (.jsonl), whose lengths and arrivals are taken"
    )
    trace_queries: int = flag(60, "of the trace, from its beginning", least=1)
    modes: tuple[str, ...] = flag(MODES, choices=MODES)
    batches: tuple[int, ...] = flag(
        (), "batch sizes (default: the paper's, 4,8 for mixed and 2,4,6,8,10 for short)", least=1
    )
    scale: float = flag(0.05, "tokens for each of the paper's words in the mixed set")
    short_scale: float = flag(1.0, "the same, in the short set; and for each token of a trace")
    repeats: int = flag(1, "runs of a cell; all cells are run once, then all of them again", least=1)
    query_seed: int = flag(0, "of lengths, order and text", least=0)
    rate: float | None = flag(
        None, "queries a second, a Poisson process or as the trace has them (default: all at once)"
    )
    padded: str = flag("", "further options of padded engines, such as prefill_group=4,park_above=0.5")
    journal: Path | None = flag(None, "of what was measured: the same command resumes there")
    name: str = flag("baton", "of the files in --output")
    CHOSEN: ClassVar[tuple[str, ...]] = (
        *("engine", "max_num_seqs", "attention_backend", "block_size"),
        *vars(EvictionConfig()),
    )
    SHOWN: ClassVar[Mapping[str, Any]] = MappingProxyType({"dtype": "float32"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sets", "modes"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        for name in ("scale", "short_scale", "rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} must be a number above 0, got {value:g}")
        if (TRACED in self.sets) != (self.trace is not None):
            raise ConfigError(f"--sets {TRACED} and --trace FILE go together")
        for cell in self.cells():
            config = EngineConfig.from_options(cell.options(self.engine, self.padded))
            if cell.mode != PAGED:
                PaddedOptions.of(config)

    def cells(self) -> Iterator[Cell]:
        """Yield cells in the order in which they are measured: what is compared stands close together."""
        for query_set in self.sets:
            batches = self.batches or published_batches(query_set)
            for batch, mode in product(batches, self.modes):
                yield Cell(query_set, mode, batch)

    @cached_property
    def traced(self) -> list[TraceRequest]:
        """The trace's queries, scaled, at `rate` on average."""
        assert self.trace is not None, "a cell of a trace has one"
        found = read_trace(self.trace, self.trace_queries)
        natural = len(found) / max(found[-1].arrival, 1e-9)
        return scaled(found, tokens=self.short_scale, rate=1.0 if self.rate is None else self.rate / natural)

    def lengths(self, cell: Cell) -> list[Lengths]:
        """Of the queries; the same for every mode."""
        if cell.query_set == TRACED:
            counts = [(each.prompt_tokens, each.output_tokens) for each in self.traced]
            return [Lengths(*(max(count, _LEAST_TOKENS) for count in each)) for each in counts]
        scale = self.scale if cell.query_set == MIXED else self.short_scale
        return draw_lengths(cell.query_set, cell.batch, scale, self.query_seed)

    def arrivals(self, cell: Cell, count: int) -> list[float]:
        """Return when each query arrives, in seconds from the first; empty: all at once."""
        if self.rate is None:
            return []
        if cell.query_set == TRACED:
            return [each.arrival for each in self.traced]
        rng = random.Random(f"arrivals/{self.query_seed}")
        return [0.0, *accumulate(rng.expovariate(self.rate) for _ in range(count - 1))]

    @property
    def identity(self) -> dict[str, Any]:
        engine = EngineConfig.from_options(
            Cell(SHORT, "static", 1).options(self.engine, self.padded)
        ).settings()
        names = ("scale", "short_scale", "query_seed", "rate", "trace_queries")
        own = {name: getattr(self, name) for name in names} | {"trace": self.trace and self.trace.name}
        return own | {"model": str(self.engine.get("model")), "engine": {**engine, "model": None}}


_TRACE_POINTS = 120
_DIGEST_BYTES = 4


@dataclass(frozen=True)
class Trace:
    """Course of a run, at moments evenly spread over its steps: one entry for each of them."""

    seconds: Sequence[float]
    completed: Sequence[int]
    tokens: Sequence[int]
    """Of answers."""
    kv_bytes: Sequence[int]
    """In use by the engine, KVs of queries that wait in host memory included."""


@dataclass(frozen=True)
class Run:
    """What one run of a cell came to."""

    seconds: float
    """From the first submission to the last token: the paper's completion time."""
    answer_tokens: int
    prompt_tokens: int
    steps: int
    kv_bytes_peak: int
    """Most that was in use after a step, as in `Trace.kv_bytes`."""
    tally: dict[str, float]
    """The padded engine's counters (`winnow_lab.padded.stats`), of this run alone; empty for the paged engine."""
    digests: Sequence[str]
    """Of each answer's token ids, in the order of the queries."""
    trace: Trace
    sustained: float = 0.0
    """Answer tokens per second up to the last step behind which queries waited or were to come; 0: there was none."""

    @property
    def idle_share(self) -> float | None:
        """Positions that were padding or of no query, of all computed; None for the paged engine."""
        return self.tally["idle"] / self.tally["positions"] if self.tally else None

    @property
    def column_share(self) -> float | None:
        """Columns held over the longest query's, summed over passes; None for the paged engine."""
        return self.tally["columns_held"] / self.tally["columns_needed"] if self.tally else None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Run":
        """Return the run whose `asdict` a journal has."""
        found = {each.name: row[each.name] for each in fields(cls)}
        return cls(**found | {"trace": Trace(**row["trace"])})


def run_cell(llm: LLM, queries: Sequence[Query], arrivals: Sequence[float] = ()) -> Run:
    """Submit all queries, at once or as they arrive, and take steps until every one is answered.

    Raises:
        InvalidRequestError: a query does not fit into the model's context or the KV memory.
    """
    llm.generate(list(queries[0].token_ids), fixed_length(2))  # libraries set themselves up at the first pass
    work = [(query.token_ids, fixed_length(query.answer_tokens)) for query in queries]
    done = answer_all(llm, work, arrivals=arrivals)
    busy = [step for step in done.steps if step.stats.num_waiting or step.submitted < len(queries)]
    before = _tally(done.before)
    trace = _trace(done.steps)
    assert trace.tokens[-1] == sum(map(len, done.answers)), "a step's output brought more than one token"
    return Run(
        seconds=done.seconds,
        answer_tokens=trace.tokens[-1],
        prompt_tokens=sum(len(query.token_ids) for query in queries),
        steps=done.counted("num_steps"),
        kv_bytes_peak=max(_kv_bytes(step.stats) for step in done.steps),
        tally={name: value - before[name] for name, value in _tally(done.steps[-1].stats).items()},
        digests=tuple(
            hashlib.sha256(str(list(answer)).encode()).hexdigest()[: 2 * _DIGEST_BYTES]
            for answer in done.answers
        ),
        trace=trace,
        sustained=sum(step.outputs for step in busy) / busy[-1].seconds if busy else 0.0,
    )


def _tally(stats: EngineStats) -> dict[str, float]:
    return asdict(stats.counters) if isinstance(stats, PaddedStats) else {}


def _kv_bytes(stats: EngineStats) -> int:
    return stats.kv_bytes_used + (stats.parked_bytes if isinstance(stats, PaddedStats) else 0)


def _trace(steps: Sequence[Step]) -> Trace:
    last = len(steps) - 1
    count = min(_TRACE_POINTS, len(steps))
    chosen = [round(number * last / max(count - 1, 1)) for number in range(count)]
    tokens = list(accumulate(step.outputs for step in steps))
    return Trace(
        tuple(round(steps[each].seconds, 3) for each in chosen),
        tuple(steps[each].finished for each in chosen),
        tuple(tokens[each] for each in chosen),
        tuple(_kv_bytes(steps[each].stats) for each in chosen),
    )


def measure(options: Options, journal: CellJournal) -> Iterator[None]:
    """Run the cells that the journal lacks, an engine for each; yields after each round over all.

    Raises:
        InvalidRequestError: a query does not fit into the model's context or the KV memory.
    """
    for turn in range(options.repeats):
        for cell in options.cells():
            if len(journal.rows.get(cell.key, ())) <= turn:
                with open_llm(cell.options(options.engine, options.padded)) as llm:
                    queries = queries_of(options, cell, llm)
                    run = run_cell(llm, queries, options.arrivals(cell, len(queries)))
                journal.add(cell.key, asdict(run))
                print(f"{cell.key}: {run.seconds:.1f} s", flush=True)
        yield


def queries_of(options: Options, cell: Cell, llm: LLM) -> list[Query]:
    """Return the same queries for every mode: prose, or for a model without a tokenizer its tokens in turn."""
    tokenizer = llm.tokenizer
    first: int | None = None
    if tokenizer is None:
        text = list(range(llm.vocab_size))
    else:
        text = tokenizer(" ".join(shipped_sentences()), add_special_tokens=False)["input_ids"]
        first = tokenizer.bos_token_id
    return with_text(options.lengths(cell), text, first, options.query_seed)
