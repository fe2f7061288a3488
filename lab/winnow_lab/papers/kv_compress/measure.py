"""The cells of KV-Compress's experiment, the work in each, and how they are measured."""

import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import product, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from winnow.config import SchedulerConfig
from winnow.errors import ConfigError
from winnow.eviction import PRESETS
from winnow.llm import LLM
from winnow_lab.bench.answering import answer_all, fixed_length
from winnow_lab.bench.presets import LlamaShape
from winnow_lab.papers.judged import AskedTask, TimedPrompt, categories_of, judged_prompts
from winnow_lab.study import EngineOptions, flag
from winnow_lab.study.journal import CellJournal

FULL = "full"
_PROMPT_PER_ANSWER = 8
"""Prompt tokens for each token of an answer, where nothing else is asked for."""


@dataclass(frozen=True)
class Cell:
    """Work that is timed: all requests of a context, under one policy at one compression.

    Attributes:
        context: tokens of a prompt, about.
        preset: a key of `winnow.eviction.PRESETS`.
        compression: tokens of a prompt per KV kept, before the floor.
        prefill_only: whether answers end with their first token: what is left is the time of the prompts.
    """

    context: int
    preset: str = FULL
    compression: float = 1.0
    prefill_only: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of a request."""
        return {} if self.preset == FULL else {"eviction": self.preset, "compression": self.compression}

    @property
    def key(self) -> str:
        """Name in a journal."""
        return json.dumps(astuple(self))


@dataclass(frozen=True)
class Options(AskedTask, EngineOptions):
    """The cells, and the work in each."""

    contexts: tuple[int, ...] = flag((1024, 2048, 3584), "tokens of a prompt with its question", least=16)
    mixed: bool = flag(False, "all contexts in one cell, in turn; answers are as long as the longest's")
    compressions: tuple[float, ...] = flag(
        (1.0, 4.0, 16.0, 64.0),
        "tokens of a prompt per KV kept, before the floor; the full cache too",
        least=1,
    )
    whole: str = flag("kv-compress", "preset whose rounds come after the prompt", choices=PRESETS)
    p_and_d: str = flag(
        "kv-compress-pd", "preset with rounds in the prompt and while decoding (P&D)", choices=PRESETS
    )
    requests: int = flag(32, "of a cell, all submitted at once", least=1)
    new_tokens: int | None = flag(None, "of each greedy answer (default: an eighth of the context)", least=2)
    kv_seqs: int = flag(1, "KV memory, as whole sequences of the longest context", least=1)
    repeat: int = flag(1, "times; all cells are measured once, then all of them again", least=1)
    prompt_seed: int = flag(0, "of the prompts", least=0)
    categories: tuple[str, ...] = flag((), "of the task (default: all)")
    random_model: bool = flag(False, "the demo model's shape with random weights and 65536 positions")
    journal: Path | None = flag(None, "of what was measured: the same command resumes there")
    name: str = flag("kv_compress", "of the files in --output")
    CHOSEN: ClassVar[tuple[str, ...]] = (
        *("eviction", "compression", "kv_budget", "num_accumulators", "kv_memory", "engine"),
    )
    SHOWN: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "dtype": "bfloat16",
            "max_model_len": "the longest prompt with its answer",
            "max_num_seqs": "as many as requests",
        }
    )

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        AskedTask.__post_init__(self)
        categories_of(self, self.categories)
        for name in ("contexts", "compressions"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        if self.whole == self.p_and_d:
            raise ConfigError(f"--whole and --p-and-d must be two presets, got {self.whole!r} for both")
        if self.random_model and self.engine.get("model") is not None:
            raise ConfigError("--random-model and --model both name a model, give one")

    @property
    def policies(self) -> tuple[str, str]:
        """The presets that stand side by side."""
        return self.whole, self.p_and_d

    @property
    def is_judged(self) -> bool:
        """Whether prompts are tasks, and not random tokens."""
        return self.task is not None or not (self.random_model or self.engine.get("model"))

    @property
    def cell_contexts(self) -> tuple[int, ...]:
        """Contexts of the cells: of mixed prompts the longest stands for all."""
        return self.contexts[-1:] if self.mixed else self.contexts

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.contexts[-1] + self.answer_tokens(self.contexts[-1])

    @property
    def opened(self) -> dict[str, Any]:
        """Options of the engines, but for memory."""
        own: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": self.requests}
        # Tables are as long as the longest sequence may be, and their bytes are KV memory too.
        found = own | {"max_model_len": self.longest_sequence} | dict(self.engine)
        most = found.get("max_num_batched_tokens", SchedulerConfig.max_num_batched_tokens)
        return found | {"max_num_batched_tokens": max(most, found["max_num_seqs"])}

    def lengths(self, context: int) -> str:
        """Return the lengths of prompts and answers of a cell, for titles."""
        prompts = f"{self.contexts[0]} to {context} mixed" if self.mixed else f"{context}"
        return f"{prompts} + {self.answer_tokens(context)} tokens"

    def answer_tokens(self, context: int) -> int:
        """Return the tokens of each answer to prompts of that length."""
        return self.new_tokens or max(context // _PROMPT_PER_ANSWER, 2)

    def compressed(self, context: int) -> Iterator[Cell]:
        """Yield the cells of a context that evict and answer."""
        for compression, preset in product(self.compressions, self.policies):
            if compression > 1:
                yield Cell(context, preset, compression)

    def cells(self) -> Iterator[Cell]:
        """Yield all cells in the order in which they are measured: what is compared stands close together.

        The longest context comes first: what does not fit is found at once.
        """
        for context in reversed(self.cell_contexts):
            yield Cell(context, prefill_only=True)
            yield Cell(context)
            yield from self.compressed(context)
            if (most := self.compressions[-1]) > 1:
                yield Cell(context, self.p_and_d, most, prefill_only=True)

    def identity(self, opened: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that runs share; how often they are repeated is not among them."""
        names = ("task", "data", "shots", "contexts", "mixed", "requests", "new_tokens", "prompt_seed")
        own = {name: getattr(self, name) for name in (*names, "categories")}
        shown = {name: str(value) if isinstance(value, Path) else value for name, value in opened.items()}
        return dict(json.loads(json.dumps(own | {"engine": shown}, default=str)))


RANDOM = LlamaShape(6, 256, 4, 2, 64, 640, 5120, 65536)
"""The demo model's shape with random weights: as fast, with room for 65,536 positions, and nothing to say."""


def task_prompts(llm: LLM, options: Options, context: int) -> list[TimedPrompt]:
    """Return the categories of a task in turn, prompts of about `context` tokens with the question last.

    Raises:
        EvaluationError: the model has no tokenizer, or the context is too short for a task.
    """
    names = categories_of(options, options.categories)
    each, most = -(-options.requests // len(names)), context + options.answer_tokens(context)
    by_category: dict[str, list[TimedPrompt]] = {name: [] for name in names}
    for prompt in judged_prompts(llm, options, names, context, each, options.prompt_seed, most):
        by_category[prompt.category].append(prompt)
    # In turn, every share of them has all categories.
    turns = zip_longest(*by_category.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][: options.requests]


def random_prompts(vocab_size: int, context: int, count: int, seed: int) -> list[TimedPrompt]:
    """Return random tokens, for models whose answers mean nothing."""
    rng = random.Random(f"{seed}/{context}")
    return [TimedPrompt(tuple(rng.randrange(vocab_size) for _ in range(context))) for _ in range(count)]


def cell_prompts(
    options: Options, context: int, make: Callable[[int], Sequence[TimedPrompt]]
) -> Sequence[TimedPrompt]:
    """Return the prompts of a cell out of those that `make` gives of a context: mixed, of each context as many."""
    if not options.mixed:
        return make(context)
    turns = zip(*map(make, options.contexts), strict=True)
    return [prompt for turn in turns for prompt in turn][: options.requests]


@dataclass(frozen=True)
class Run:
    """One run of a cell.

    Attributes:
        total_tokens: of all prompts and answers.
        decoding_steps: in which at least one request got a token; mean_batch, most_batch: requests that did.
        rounds: of eviction, each over one or more requests.
        kv_bytes_peak: most KV memory in use between two steps.
        parts: seconds by part of the step: schedule, evict, execute, output.
        reached: tokens for each KV held in a row at the end of an answer, mean over the requests.
        scores: of the answers, in the order of the prompts; empty for random tokens; categories: theirs.
    """

    seconds: float
    total_tokens: int
    decoding_steps: int
    mean_batch: float
    most_batch: int
    preemptions: int
    rounds: int
    kv_bytes_peak: int
    parts: dict[str, float]
    reached: float
    scores: Sequence[float]
    categories: Sequence[str] = ()

    @property
    def total_rate(self) -> float:
        """Tokens of prompts and answers per second."""
        return self.total_tokens / self.seconds

    @property
    def by_category(self) -> dict[str, float]:
        """Mean score of each category."""
        found: dict[str, list[float]] = {}
        for category, score in zip(self.categories, self.scores, strict=True):
            found.setdefault(category, []).append(score)
        return {category: statistics.fmean(scores) for category, scores in found.items()}

    @property
    def accuracy(self) -> float | None:
        """Mean score; None where there is nothing to score."""
        return statistics.fmean(self.scores) if self.scores else None


def run_cell(llm: LLM, cell: Cell, prompts: Sequence[TimedPrompt], new_tokens: int) -> Run:
    """Answer all prompts at once, greedily, each with exactly `new_tokens` tokens.

    Raises:
        InvalidRequestError: a request does not fit into the model's context or the KV memory.
    """
    params = fixed_length(1 if cell.prefill_only else new_tokens, **cell.options)
    done = answer_all(llm, [(prompt.token_ids, params) for prompt in prompts])
    batches = [step.outputs for step in done.steps if step.outputs]
    reports = [output.outputs[0].eviction for output in done.outputs]
    asked = [] if cell.prefill_only else list(zip(prompts, done.answers, strict=True))
    graded = [prompt.score(answer, llm.tokenizer) for prompt, answer in asked]
    return Run(
        seconds=done.seconds,
        total_tokens=sum(len(prompt.token_ids) for prompt in prompts) + sum(map(len, done.answers)),
        decoding_steps=len(batches),
        mean_batch=statistics.fmean(batches),
        most_batch=max(batches),
        preemptions=done.counted("num_preemptions"),
        rounds=done.counted("num_rounds"),
        kv_bytes_peak=done.kv_bytes_peak,
        parts=done.parts,
        reached=statistics.fmean(1.0 if report is None else report.compression for report in reports),
        scores=[round(each, 4) for each in graded if each is not None],
        categories=[prompt.category for prompt, _ in asked if prompt.question],
    )


def runs_of(journal: CellJournal, cell: Cell) -> tuple[Run, ...]:
    """Return the runs of a cell, one for each time that the cells were gone through."""
    kept = journal.rows.get(cell.key, ())
    return tuple(Run(**{k: v for k, v in row.items() if k not in ("commit", "date")}) for row in kept)


def measure(options: Options, journal: CellJournal, full: LLM, evicting: LLM) -> Iterator[None]:
    """Measure the cells that the journal lacks; yields after each round over all.

    Args:
        full: an engine without eviction.
        evicting: one opened for policies whose rows differ, with as much KV memory; requests bring their policy.

    Raises:
        InvalidRequestError: a request does not fit into the model's context or the KV memory.
    """

    def make(context: int) -> Sequence[TimedPrompt]:
        if options.is_judged:
            return task_prompts(full, options, context)
        return random_prompts(full.vocab_size, context, options.requests, options.prompt_seed)

    prompts = {each: cell_prompts(options, each, make) for each in options.cell_contexts}
    longest = max((prompt.token_ids for each in prompts.values() for prompt in each), key=len)
    for llm in (full, evicting):  # chunks and steps of the shapes to come, so that no cell is the first
        llm.generate(longest, fixed_length(2))
    for turn in range(options.repeat):
        for cell in options.cells():
            if len(journal.rows.get(cell.key, ())) <= turn:
                llm, new_tokens = evicting if cell.options else full, options.answer_tokens(cell.context)
                run = run_cell(llm, cell, prompts[cell.context], new_tokens)
                journal.add(cell.key, asdict(run))
                print(f"{cell}: {run.seconds:.1f} s", flush=True)
        yield
