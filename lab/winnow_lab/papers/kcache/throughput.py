"""Tokens per second while sequences decode, by input length and batch, in a given KV memory (the paper's Table 3)."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from winnow import LLM
from winnow.errors import InvalidRequestError
from winnow_lab.bench.answering import answer_all, fixed_length
from winnow_lab.bench.workload import Workload
from winnow_lab.papers.kcache.options import Options
from winnow_lab.papers.kcache.protocol import Setting


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
    settings: Sequence[Setting], cells: Sequence[tuple[int, int]], arguments: Options
) -> Iterator[Cell]:
    """Measure what the journal does not have, setting by setting, and yield all of it."""
    path: Path = arguments.work / "throughput.jsonl"
    known = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            cell = Cell(**json.loads(line))
            known[cell.setting, cell.prompt_tokens, cell.batch] = cell
    for setting in settings:
        asked = [(setting.label, *cell) for cell in cells]
        left = [key for key in asked if key not in known]
        if left and not arguments.report:
            with LLM(
                arguments.model,
                dtype="bfloat16",
                kv_memory=arguments.kv_memory,
                threads=arguments.threads,
                enable_prefix_caching=False,
                **setting.options,
            ) as llm:
                for key in left:
                    runs = [
                        _measure(llm, *key, new_tokens=arguments.decode_tokens) for _ in range(arguments.runs)
                    ]
                    rates = tuple(run.rate for run in runs if run.rate is not None)
                    middle = statistics.median(rates) if rates else None
                    cell = replace(runs[-1], rate=middle, rates=rates)
                    known[key] = cell
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(cell)) + "\n")
        yield from (known[key] for key in asked if key in known)


def _measure(llm: LLM, label: str, prompt_tokens: int, batch: int, *, new_tokens: int) -> Cell:
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
    return Cell(
        label,
        prompt_tokens,
        batch,
        outputs / seconds,
        done.kv_bytes_peak,
        max(step.stats.value_tier.bytes_used for step in done.steps if step.stats.value_tier is not None),
        (end.rows_selected - start.rows_selected) / heads,
        (end.rows_read - start.rows_read) / heads,
        (end.seconds_waited - start.seconds_waited) / len(done.steps),
    )
