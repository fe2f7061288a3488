"""Long prompts that ask for six times the memory there is: what admission and preemption make of them.

    python -m winnow_lab.memory.oversubscribed --json FILE

All requests come at once, with answers of the same length, and the KV memory holds the prompts of `--fits` of them and
a little more: their answers do not fit. Each row is an engine of its own, in one process, one after the other:

prompt: a request holds blocks for its prompt and its whole answer from its start; no request is preempted.
recompute: requests hold what they have computed. Who is admitted was promised room for its prompt and the next block of
  all. When answers need more, the cheapest to lose gives way, and computes its tokens again.
swap: the same, with host memory to which it is copied where that is the cheaper way.
greedy: a request is admitted as soon as its next chunk fits, whatever others were promised, as engines do that look at
  free blocks alone; who gives way computes its tokens again.
compress: under a policy that evicts under pressure before anybody is preempted, and nothing before.
compress at once: the same after the prompt, and under pressure.

The ratio is to the slowest row. Compressed rows answer from fewer KVs; what that costs in accuracy `winnow eval` says.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from winnow import LLM
from winnow.cache import CacheSize, Ledger
from winnow.config import SchedulerConfig
from winnow.engine.memory.prefixes import FoundPrefix, PrefixSharing
from winnow.engine.memory.room import Room
from winnow.engine.requests.request import Sequence as Sample
from winnow.eviction import When
from winnow.eviction.presets import find_preset
from winnow.values.units import format_bytes
from winnow_lab.bench.answering import answer_all, fixed_length
from winnow_lab.report.tables import TextTable
from winnow_lab.study import ModelOptions, Result, flag, in_turn, run_study

ROWS = ("prompt", "recompute", "swap", "greedy", "compress", "compress at once")


@dataclass(frozen=True)
class Options(ModelOptions):
    """Work, memory and rows."""

    requests: int = flag(24, least=1)
    prompt: int = flag(2000, "tokens of each prompt", least=1)
    answer: int = flag(128, "tokens of each answer", least=1)
    fits: int = flag(4, "prompts that the KV memory holds", least=1)
    eviction: str = flag("leverage", "whose score and budget the compressed rows have")
    compression: float = flag(4.0, least=1)
    rows: tuple[str, ...] = flag(ROWS, choices=ROWS)
    repeat: int = flag(1, "times that all rows run; medians of seconds count", least=1)


@dataclass(frozen=True)
class Measured:
    """What one engine made of the requests.

    Attributes:
        seconds: from the first step to the last token.
        running: requests with KVs at a time, on average over steps.
        recomputed: tokens that preempted requests computed again.
    """

    seconds: float
    output_rate: float
    running: float
    most_running: int
    preemptions: int
    swaps: int
    recomputed: int
    rounds: int


class GreedyRoom(Room):
    """Room as engines see it that promise nothing: the next chunk fits, or it does not."""

    def __init__(self, config: SchedulerConfig, ledger: Ledger, prefixes: PrefixSharing) -> None:
        super().__init__(config, ledger, prefixes)
        self._chunk = config.prefill_chunk or config.max_num_batched_tokens

    def lacking(
        self,
        newcomer: Sample,
        running: Sequence[Sample],
        without: int = 0,
        prefix: FoundPrefix | None = None,
    ) -> int:
        free = self._ledger.allocator.num_free
        if newcomer.kv.host_id is not None:
            return self._ledger.host.copies[newcomer.kv.host_id].num_blocks - free
        return self._ledger.layout.blocks_for(min(newcomer.num_tokens, self._chunk)) - free


def admit_greedily(llm: LLM) -> None:
    """Let an engine admit each request whose next chunk fits."""
    scheduler: Any = llm._engine.scheduler  # type: ignore[attr-defined]
    memory = scheduler.memory
    memory.room = GreedyRoom(scheduler._config, memory.ledger, memory.prefixes)


def settings(row: str, kv_memory: int, eviction: str, compression: float) -> dict[str, Any]:
    """The engine's options of a row."""
    options: dict[str, Any] = {"kv_memory": kv_memory, "enable_prefix_caching": False, "kv_floor": 1}
    if row == "prompt":
        return options | {"kv_reservation": "prompt"}
    if row == "swap":
        return options | {"kv_offloading_size": 8 * kv_memory}
    if row.startswith("compress"):
        policy = find_preset(eviction).policy
        when = When(after_prefill=True, pressure=True) if row == "compress at once" else When(pressure=True)
        return options | {"eviction": replace(policy, when=when), "compression": compression}
    return options


def look_at(model: str | None, fits: int, prompt: int, answer: int) -> tuple[int, int]:
    """KV memory, tables included, for `fits` prompts and the next two blocks in each of their rows; and the size of
    the model's vocabulary."""
    with LLM(model, kv_memory="2GiB", max_model_len=prompt + answer, kv_floor=1) as llm:
        executor: Any = llm._engine._executor  # type: ignore[attr-defined]
        layout, size = executor.layout, executor.size
        blocks = fits * (layout.blocks_for(prompt) + 2 * layout.rows_per_seq)
        memory = CacheSize.of_blocks(layout, blocks, size.max_num_seqs, prompt + answer).nbytes(layout)
        return memory, executor._model.vocab_size


def measure(
    model: str | None, row: str, options: dict[str, Any], prompts: list[list[int]], answer: int
) -> Measured:
    """Answer all prompts."""
    with LLM(model, max_model_len=len(prompts[0]) + answer, **options) as llm:
        if row == "greedy":
            admit_greedily(llm)
        llm.generate([prompts[0][:64]], fixed_length(2))  # what the first steps alone do
        answered = answer_all(llm, [(prompt, fixed_length(answer)) for prompt in prompts], final_only=True)
    seconds = answered.steps[-1].seconds
    running = [step.stats.num_running + step.outputs for step in answered.steps]
    return Measured(
        seconds,
        len(prompts) * answer / seconds,
        statistics.mean(running),
        max(running),
        answered.counted("num_preemptions"),
        answered.counted("num_swaps"),
        answered.counted("recomputed_tokens"),
        answered.counted("num_rounds"),
    )


def table(title: str, rows: dict[str, Measured]) -> TextTable:
    """A line per row, with its ratio to the slowest."""
    slowest = max(each.seconds for each in rows.values())
    columns: dict[str, Callable[[Measured], str]] = {
        "s": lambda each: f"{each.seconds:.1f}",
        "output tokens/s": lambda each: f"{each.output_rate:,.1f}",
        "ratio": lambda each: f"{slowest / each.seconds:.2f}x",
        "batch, mean": lambda each: f"{each.running:.1f}",
        "most": lambda each: f"{each.most_running}",
        "preemptions": lambda each: f"{each.preemptions}",
        "swaps": lambda each: f"{each.swaps}",
        "tokens recomputed": lambda each: f"{each.recomputed:,}",
        "rounds": lambda each: f"{each.rounds}",
    }
    return TextTable.of(title, "", rows, columns)


def study(typed: Options) -> Iterator[Result]:
    """All rows in turn, some times; the median by seconds counts."""
    memory, vocab = look_at(typed.model, typed.fits, typed.prompt, typed.answer)
    chance = Random(0)
    prompts = [chance.choices(range(3, vocab), k=typed.prompt) for _ in range(typed.requests)]

    def of_row(row: str) -> Measured:
        options = settings(row, memory, typed.eviction, typed.compression)
        return measure(typed.model, row, options, prompts, typed.answer)

    title = (
        f"{typed.requests} prompts of {typed.prompt:,} tokens, answers of {typed.answer}, in {format_bytes(memory)}, "
        f"which hold {typed.fits} prompts"
    )
    for runs in in_turn({row: row for row in typed.rows}, typed.repeat, of_row):
        rows = {row: sorted(each, key=lambda m: m.seconds)[len(each) // 2] for row, each in runs.items()}
        numbers = {row: [asdict(each) for each in found] for row, found in runs.items()}
        yield Result(
            "Long prompts in scarce memory",
            [table(title, rows)],
            numbers={"kv_memory": memory, "rows": numbers},
        )


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
