"""Long prompts that ask for six times the memory there is: what admission and preemption make of them.

    python -m winnow_lab.memory.oversubscribed [--model MODEL] [--requests 24] [--prompt 2000] [--answer 128] [--fits 4]
        [--eviction leverage] [--compression 4] [--rows NAME ...] [--repeat 1] [--json FILE]

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

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
from winnow.report.provenance import Machine, origin, report_head, typed_command
from winnow.values.json_values import dump_json
from winnow.values.units import format_bytes
from winnow_lab.bench.answering import answer_all, fixed_length
from winnow_lab.report.tables import TextTable

ROWS = ("prompt", "recompute", "swap", "greedy", "compress", "compress at once")


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

    def entries(each: Measured) -> tuple[str, ...]:
        return (
            f"{each.seconds:.1f}",
            f"{each.output_rate:,.1f}",
            f"{slowest / each.seconds:.2f}x",
            f"{each.running:.1f}",
            f"{each.most_running}",
            f"{each.preemptions}",
            f"{each.swaps}",
            f"{each.recomputed:,}",
            f"{each.rounds}",
        )

    columns = (
        "s",
        "output tokens/s",
        "ratio",
        "batch, mean",
        "most",
        "preemptions",
        "swaps",
        "tokens recomputed",
        "rounds",
    )
    return TextTable(title, "", columns, tuple((name, entries(each)) for name, each in rows.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory or GGUF file (default: the demo model)")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--fits", type=int, default=4, help="prompts that the KV memory holds")
    parser.add_argument(
        "--eviction", default="leverage", help="whose score and budget the compressed rows have"
    )
    parser.add_argument("--compression", type=float, default=4.0)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument(
        "--repeat", type=int, default=1, help="times that all rows run; medians of seconds count"
    )
    parser.add_argument("--json", type=Path, help="write the numbers too")
    typed = parser.parse_args()
    for name in ("requests", "prompt", "answer", "fits", "repeat"):
        if getattr(typed, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(typed, name)}")
    memory, vocab = look_at(typed.model, typed.fits, typed.prompt, typed.answer)
    chance = Random(0)
    prompts = [chance.choices(range(3, vocab), k=typed.prompt) for _ in range(typed.requests)]
    runs: dict[str, list[Measured]] = {row: [] for row in typed.rows}
    for _ in range(typed.repeat):
        for row, measured in runs.items():
            options = settings(row, memory, typed.eviction, typed.compression)
            measured.append(measure(typed.model, row, options, prompts, typed.answer))
    rows = {row: sorted(each, key=lambda m: m.seconds)[len(each) // 2] for row, each in runs.items()}
    head = report_head(typed_command(), Machine.here())
    title = (
        f"{typed.requests} prompts of {typed.prompt:,} tokens, answers of {typed.answer}, in {format_bytes(memory)}, "
        f"which hold {typed.fits} prompts"
    )
    print("\n".join([*table(title, rows).markdown(), "", *origin(head)]))
    if typed.json is not None:
        numbers = {
            "kv_memory": memory,
            "rows": {row: [asdict(each) for each in measured] for row, measured in runs.items()},
        }
        typed.json.write_text(dump_json(head | numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
