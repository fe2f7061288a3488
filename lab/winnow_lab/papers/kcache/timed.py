"""What is timed: tokens per second while sequences decode (Table 3), and questions in turn on one context."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from winnow import LLM, SamplingParams
from winnow.errors import InvalidRequestError
from winnow_lab.bench.answering import answer_all, fixed_length
from winnow_lab.bench.presets import Workload
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.prompt import PromptMaker
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks.task import settings_for
from winnow_lab.papers.kcache.protocol import Options, Setting
from winnow_lab.tasks import load_task


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        rate: tokens per second of the steps in which all sequences decode, median of the runs; None: they never were
            all in memory. rates: of each run.
        device_bytes: of blocks in use at most, on the device; tier_bytes: of values apart.
        rows_per_head: values that a query head read in a step, at most N.
        rows_read: values that were read for the heads of a group, for each of them.
        seconds_waited: for values to arrive, in a step.
    """

    setting: str
    prompt_tokens: int
    batch: int
    rate: float | None
    device_bytes: int = 0
    tier_bytes: int = 0
    rows_per_head: float = 0.0
    rows_read: float = 0.0
    seconds_waited: float = 0.0
    rates: tuple[float, ...] = ()


def measure(
    settings: Sequence[Setting], cells: Sequence[tuple[int, int]], options: Options
) -> Iterator[Cell]:
    """Measure what the journal does not have, setting by setting, and yield all of it."""
    journal = options.journal("throughput")
    for setting in settings:
        names = {f"{setting.label}/{tokens}/{batch}": (tokens, batch) for tokens, batch in cells}
        left = [] if options.report else [name for name in names if name not in journal.rows]
        if left:
            with options.open(enable_prefix_caching=False, **setting.options) as llm:
                for name in left:
                    journal.add(name, asdict(_median(llm, setting.label, *names[name], options)))
        yield from (Cell(**journal.row(name)) for name in names if name in journal.rows)


def _median(llm: LLM, label: str, prompt_tokens: int, batch: int, options: Options) -> Cell:
    runs = [_measure(llm, label, prompt_tokens, batch, options.decode_tokens) for _ in range(options.runs)]
    rates = tuple(run.rate for run in runs if run.rate is not None)
    return replace(runs[-1], rate=statistics.median(rates) if rates else None, rates=rates)


def _measure(llm: LLM, label: str, prompt_tokens: int, batch: int, new_tokens: int) -> Cell:
    work = Workload(batch, prompt_tokens, new_tokens)
    before = llm.stats().value_tier
    try:
        done = answer_all(llm, [(prompt, fixed_length(new_tokens)) for prompt in work.prompts(1000)])
    except InvalidRequestError:
        return Cell(label, prompt_tokens, batch, None)
    seconds = outputs = 0.0
    for last, step in zip(done.steps, done.steps[1:], strict=False):
        if step.outputs == batch and last.outputs == batch:
            seconds, outputs = seconds + step.seconds - last.seconds, outputs + batch
    if not outputs:
        return Cell(label, prompt_tokens, batch, None)
    tier = llm.stats().value_tier
    cell = Cell(label, prompt_tokens, batch, outputs / seconds, done.kv_bytes_peak)
    if tier is None or before is None:
        return cell
    start, end = before.total, tier.total
    heads = max(end.head_queries - start.head_queries, 1)
    tiers = (step.stats.value_tier for step in done.steps)
    return replace(
        cell,
        tier_bytes=max(each.bytes_used for each in tiers if each is not None),
        rows_per_head=(end.rows_selected - start.rows_selected) / heads,
        rows_read=(end.rows_read - start.rows_read) / heads,
        seconds_waited=(end.seconds_waited - start.seconds_waited) / len(done.steps),
    )


@dataclass(frozen=True)
class Turns:
    """One setting: parts of answers that are right and seconds of a turn, of first questions and of later ones."""

    setting: str
    first: float
    later: float
    first_seconds: float
    later_seconds: float
    device_bytes: int


def conversations(options: Options) -> Iterator[Turns]:
    """Measure what the journal does not have, setting by setting, and yield all of it."""
    journal = options.journal("turns")
    # As many words of value_tier as the engine's default has.
    settings: dict[str, dict[str, Any]] = {"full": {}}
    settings |= {f"N={n}, L=1": Setting(n, 1, "renormalize").options for n in options.top_n}
    evicted = {"eviction": "kv-compress", "compression": options.compression}
    for label, own in (settings | {f"kv-compress {options.compression:g}x": evicted}).items():
        if label not in journal.rows and not options.report:
            journal.add(label, asdict(_conversation(label, own, options)))
        if label in journal.rows:
            yield Turns(**journal.row(label))


def _conversation(label: str, own: dict[str, Any], options: Options) -> Turns:
    with options.open(**own) as llm:
        samples = load_task("documents").samples(
            settings_for(
                llm,
                samples=options.samples,
                tokens=options.tokens,
                questions=options.questions,
                seed=options.seed,
            )
        )
        llm.generate([list(range(3, 67))], SamplingParams(max_tokens=2))  # what only a first step does
        start, turns = llm.stats().kv_bytes_used, [_converse(llm, sample) for sample in samples]
        peak = llm.stats().kv_bytes_peak - start
    firsts, laters = [turn[0] for turn in turns], [each for turn in turns for each in turn[1:]]
    (first, first_seconds), (later, later_seconds) = (
        [fmean(column) for column in zip(*part, strict=True)] for part in (firsts, laters)
    )
    return Turns(label, first, later, first_seconds, later_seconds, peak)


def _converse(llm: LLM, sample: Sample) -> list[tuple[float, float]]:
    """Ask a sample's questions in one conversation. Returns the score and the seconds of each."""
    tokenizer: Any = llm.tokenizer
    prompt: list[int] = []
    found = []
    for number, question in enumerate(sample.questions):
        # Tokens of earlier turns stay as they are: a session continues behind what rounds left of these alone.
        if number == 0:
            prompt += PromptMaker(tokenizer, "off").make(sample, question).token_ids
        else:
            prompt += tokenizer.encode(question.plain, add_special_tokens=False)
        params = SamplingParams(temperature=0.0, max_tokens=question.max_tokens, stop=question.stop)
        begun = time.perf_counter()
        [output] = llm.generate([prompt], params, session_id=sample.name, use_tqdm=False)
        seconds, [answer] = time.perf_counter() - begun, output.outputs
        right = score(question.metric, answer.text, question.references, question.classes)
        found.append((right, seconds))
        prompt += answer.token_ids
    return found
