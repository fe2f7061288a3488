"""Tokens per second while sequences decode, by input length and batch, in a given KV memory (the paper's Table 3)."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from winnow import LLM
from winnow.errors import InvalidRequestError
from winnow_lab.bench.answering import answer_all, fixed_length
from winnow_lab.bench.workload import Workload
from winnow_lab.papers.kcache.protocol import Options, Setting


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
