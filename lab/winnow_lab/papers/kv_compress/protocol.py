"""KV-Compress (Rehg 2024), sections 5.4 to 5.7: the cells, the work in each, and how they are measured."""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product, zip_longest
from typing import Any

from winnow.config import option
from winnow.errors import ConfigError, known_names
from winnow.eviction import PRESETS
from winnow.llm import LLM
from winnow.values.checks import check_counts
from winnow_lab.bench.answering import OnStep, answer_all, fixed_length
from winnow_lab.bench.lists import integers, names, numbers
from winnow_lab.bench.presets import LlamaShape
from winnow_lab.papers.harness import missing
from winnow_lab.papers.judged import AskedTask, TimedPrompt, categories_of, judged_prompts

FULL = "full"
WHOLE_PROMPT = "kv-compress"
"""Rounds after the prompt, which has to fit whole, and before a preemption: the paper's integration."""
P_AND_D = "kv-compress-pd"
"""Rounds within the prompt and while decoding too, so that a prompt takes its chunk on top of its budget."""

# Prompt tokens for each token of an answer, where nothing else is asked for.
_PROMPT_PER_ANSWER = 8


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
        """What a request asks of eviction."""
        return {} if self.preset == FULL else {"eviction": self.preset, "compression": self.compression}


@dataclass(frozen=True)
class Grid(AskedTask):
    """The cells, and the work in each.

    Raises:
        ConfigError: a value is out of range.
    """

    contexts: tuple[int, ...] = option(
        (1024, 2048, 3584), "tokens of a prompt with its question, commas between", parse=integers
    )
    mixed: bool = option(
        False, "requests of all contexts in one cell, in turn; answers are as long as the longest's"
    )
    compressions: tuple[float, ...] = option(
        (1.0, 4.0, 16.0, 64.0),
        "tokens of a prompt per KV kept, before the floor; commas between; the full cache is always measured",
        parse=numbers,
    )
    whole: str = option(WHOLE_PROMPT, "preset whose rounds come after the prompt")
    p_and_d: str = option(P_AND_D, "preset whose rounds come within the prompt and while decoding too (P&D)")
    requests: int = option(32, "requests of a cell, all submitted at once")
    new_tokens: int | None = option(
        None,
        "tokens of each answer, greedy; the end of text does not end it; left out: an eighth of the context",
        parse=int,
    )
    kv_seqs: int = option(1, "KV memory, as whole sequences of the longest context")
    repeat: int = option(1, "times; all cells are measured once, then all of them again")
    prompt_seed: int = option(0, "of the prompts")
    categories: tuple[str, ...] = option((), "of the task, commas between; left out: all", parse=names)

    def __post_init__(self) -> None:
        super().__post_init__()
        categories_of(self, self.categories)
        check_counts(self, zero=("prompt_seed",))
        for name in ("contexts", "compressions"):
            values = getattr(self, name)
            object.__setattr__(self, name, tuple(sorted(set(values))))
            if not values:
                raise ConfigError(f"{name} must hold at least one number")
        for name, value, least in (("contexts", self.contexts[0], 16), ("new_tokens", self.new_tokens, 2)):
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        for name in ("whole", "p_and_d"):
            preset = getattr(self, name)
            if preset not in PRESETS:
                raise ConfigError(
                    f"{name} must be an eviction preset, got {preset!r}; {known_names(preset, PRESETS)}"
                )
        if self.whole == self.p_and_d:
            raise ConfigError(f"whole and p_and_d must be two presets, got {self.whole!r} for both")
        for compression in self.compressions:
            if not 1.0 <= compression < float("inf"):
                raise ConfigError(f"compressions must be finite numbers of at least 1, got {compression:g}")

    @property
    def most_compressed(self) -> float:
        return self.compressions[-1]

    @property
    def policies(self) -> tuple[str, str]:
        """The presets that stand side by side."""
        return self.whole, self.p_and_d

    @property
    def cell_contexts(self) -> tuple[int, ...]:
        """Contexts of the cells: of mixed prompts the longest stands for all."""
        return self.contexts[-1:] if self.mixed else self.contexts

    def lengths(self, context: int) -> str:
        """What prompts and answers of a cell take, for titles."""
        prompts = f"{self.contexts[0]} to {context} mixed" if self.mixed else f"{context}"
        return f"{prompts} + {self.answer_tokens(context)} tokens"

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.contexts[-1] + self.answer_tokens(self.contexts[-1])

    def answer_tokens(self, context: int) -> int:
        """Tokens of each answer to prompts of that length."""
        return max(context // _PROMPT_PER_ANSWER, 2) if self.new_tokens is None else self.new_tokens

    def cells(self) -> Iterator[Cell]:
        """All of them, in the order in which they are measured: what is compared stands close together.

        The longest context comes first: what does not fit is found at once.
        """
        for context in reversed(self.cell_contexts):
            yield Cell(context, prefill_only=True)
            yield Cell(context)
            yield from self.compressed(context)
            if self.most_compressed > 1:
                yield Cell(context, self.p_and_d, self.most_compressed, prefill_only=True)

    def compressed(self, context: int) -> Iterator[Cell]:
        """The cells of a context that evict and answer."""
        for compression, preset in product(self.compressions, self.policies):
            if compression > 1:
                yield Cell(context, preset, compression)

    def settings(self) -> dict[str, Any]:
        """What runs must share to be compared. How often they are repeated is not among it."""
        reported = asdict(self)
        del reported["repeat"], reported["new_tokens"]
        if not self.mixed:
            del reported["mixed"]  # reports from before there were mixed prompts do not name it
        reported["answer_tokens"] = [self.answer_tokens(context) for context in self.contexts]
        reported["data"] = self.data and str(self.data)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in reported.items()}


RANDOM = LlamaShape(
    num_hidden_layers=6,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=640,
    vocab_size=5120,
    max_position_embeddings=65536,
)
"""The demo model's shape with random weights: as fast, with room for 65,536 positions, and nothing to say."""


def task_prompts(llm: LLM, grid: "Grid", context: int) -> list[TimedPrompt]:
    """Return the categories of a task in turn, prompts of about `context` tokens with the question last.

    Raises:
        EvaluationError: the model has no tokenizer, or the context is too short for a task.
    """
    names = categories_of(grid, grid.categories)
    each, most = -(-grid.requests // len(names)), context + grid.answer_tokens(context)
    by_category: dict[str, list[TimedPrompt]] = {name: [] for name in names}
    for prompt in judged_prompts(llm, grid, names, context, each, grid.prompt_seed, most):
        by_category[prompt.category].append(prompt)
    # In turn, every share of them has all categories.
    turns = zip_longest(*by_category.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][: grid.requests]


def random_prompts(vocab_size: int, context: int, count: int, seed: int) -> list[TimedPrompt]:
    """Random tokens: for models whose answers mean nothing."""
    rng = random.Random(f"{seed}/{context}")
    return [TimedPrompt(tuple(rng.randrange(vocab_size) for _ in range(context))) for _ in range(count)]


def cell_prompts(
    grid: Grid, context: int, make: Callable[[int], Sequence[TimedPrompt]]
) -> Sequence[TimedPrompt]:
    """Return the prompts of a cell out of those that `make` gives of a context: mixed, of each context as many."""
    if not grid.mixed:
        return make(context)
    turns = zip(*map(make, grid.contexts), strict=True)
    return [prompt for turn in turns for prompt in turn][: grid.requests]


@dataclass(frozen=True)
class Run:
    """What one run of a cell came to."""

    seconds: float
    total_tokens: int
    """Of all prompts and answers."""
    decoding_steps: int
    """Steps in which at least one request got a token."""
    mean_batch: float
    """Requests that got a token, over those steps."""
    most_batch: int
    """The largest decoding batch that was reached."""
    preemptions: int
    rounds: int
    """Of eviction, each over one or more requests."""
    kv_bytes_peak: int
    """Most KV memory in use between two steps."""
    parts: dict[str, float]
    """Seconds by part of the step: schedule, evict, execute, output."""
    reached: float
    """Tokens for each KV held in a row at the end of an answer, mean over the requests."""
    scores: tuple[float, ...]
    """Of the answers, in the order of the prompts; empty for random tokens."""
    categories: tuple[str, ...] = ()
    """Of the answers that have scores."""

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


def run_cell(llm: LLM, cell: Cell, prompts: Sequence[TimedPrompt], new_tokens: int, on_step: OnStep) -> Run:
    """Answer all prompts at once, greedily, each with exactly `new_tokens` tokens.

    Raises:
        InvalidRequestError: a request does not fit into the model's context or the KV memory.
    """
    params = fixed_length(1 if cell.prefill_only else new_tokens, **cell.options)
    done = answer_all(llm, [(prompt.token_ids, params) for prompt in prompts], on_step)
    batches = [step.outputs for step in done.steps if step.outputs]
    reports = [output.outputs[0].eviction for output in done.outputs]
    graded = [
        prompt.score(answer, llm.tokenizer) for prompt, answer in zip(prompts, done.answers, strict=True)
    ]
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
        scores=() if cell.prefill_only else tuple(round(each, 4) for each in graded if each is not None),
        categories=() if cell.prefill_only else tuple(each.category for each in prompts if each.question),
    )


@dataclass
class Study:
    """Runs by cell, one for each time that the cells were gone through."""

    grid: Grid
    engine: Mapping[str, Any]
    """Options of the engines, as JSON values."""
    runs: dict[Cell, list[Run]] = field(default_factory=dict)
    heads: list[dict[str, Any]] = field(default_factory=list)
    """Command, commit, machine and date of each start that measured something."""

    @property
    def missing(self) -> list[Cell]:
        """What is still to be measured, in order; a cell may be named several times."""
        return missing(
            list(self.grid.cells()), self.grid.repeat, {cell: len(runs) for cell, runs in self.runs.items()}
        )

    def add(self, cell: Cell, run: Run) -> None:
        """Keep one more run of a cell."""
        self.runs.setdefault(cell, []).append(run)

    def to_json(self) -> dict[str, Any]:
        """Settings and runs, from which `resume` makes the same study."""
        runs = [asdict(cell) | asdict(run) for cell, runs in self.runs.items() for run in runs]
        return {
            "measured": self.heads,
            "settings": self.grid.settings(),
            "engine": dict(self.engine),
            "runs": runs,
        }

    def resume(self, report: Mapping[str, Any]) -> None:
        """Take over the runs of an earlier report.

        Raises:
            ConfigError: they were measured with other settings; names the first that differs.
        """
        for part, ours in (("settings", self.grid.settings()), ("engine", dict(self.engine))):
            theirs = report.get(part, {})
            for name in sorted(ours.keys() | theirs.keys()):
                if ours.get(name) != theirs.get(name):
                    raise ConfigError(
                        f"cannot resume from runs of other settings: {name} was {theirs.get(name)!r} "
                        f"and is {ours.get(name)!r}"
                    )
        self.heads += report["measured"]
        for reported in report["runs"]:
            cell = Cell(
                **{name: reported.pop(name) for name in ("context", "preset", "compression", "prefill_only")}
            )
            lists = {name: tuple(reported[name]) for name in ("scores", "categories")}
            self.add(cell, Run(**reported | lists))


def measure(
    study: Study,
    full: LLM,
    evicting: LLM,
    prompts: Mapping[int, Sequence[TimedPrompt]],
    on_step: Callable[[Cell], OnStep],
    on_run: Callable[[], None],
) -> None:
    """Measure what the study misses.

    Args:
        full: an engine without eviction.
        evicting: one opened for policies whose rows differ, with as much KV memory; requests bring their policy.
        prompts: by context.
        on_step: makes the function that shows the progress of a cell.
        on_run: is called after each run, when the study has it.

    Raises:
        InvalidRequestError: a request does not fit into the model's context or the KV memory.
    """
    longest = max((prompt.token_ids for each in prompts.values() for prompt in each), key=len)
    for llm in (full, evicting):  # chunks and steps of the shapes to come, so that no cell is the first
        llm.generate(longest, fixed_length(2))
    for cell in study.missing:
        llm = evicting if cell.options else full
        new_tokens = study.grid.answer_tokens(cell.context)
        study.add(cell, run_cell(llm, cell, prompts[cell.context], new_tokens, on_step(cell)))
        on_run()
