"""What eviction costs: the share of a run's time that goes into scoring, planning and moving, and memory of rounds.

    python -m winnow_lab.speed.eviction_overhead [--model M] [--compression 8] [--requests 16] [--tokens 128]
        [--presets A,B]

Answers long demo prompts under each preset. Scoring is what the attention pass does for scores,
timed inside it; planning and moving are the rounds, as each answer's `EvictionReport` says. Beside them stand the time
of the whole run, and that of the same run with the full cache. The last two columns are of the round of one prompt that
needed most: bytes of the tensors that lived at once, and these beside the float32 scores that it ranked, which
KV-Compress puts at about 8 (4.2.3).
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from winnow import LLM, SamplingParams
from winnow.attention import observer_reference
from winnow.engine.scheduling.eviction_scheduler import EvictionScheduler
from winnow.eviction import PRESETS
from winnow_lab.checkout import ROOT

PROMPTS = ROOT / "examples" / "demo" / "prompts.jsonl"


class Stopwatch:
    """Seconds spent inside functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


class RoundMemory:
    """Bytes of tensors that rounds allocate at most, as a profiler sees them; it wraps `EvictionScheduler._run`."""

    def __init__(self) -> None:
        self.peaks: list[tuple[int, float]] = []

    def around(self, run: Callable[..., None]) -> Callable[..., None]:
        def profiled(scheduler: Any, leaders: list[Any], same: Any, step: float | None) -> None:
            scores = 4 * int(scheduler._ledger.lengths[[each.kv.slot for each in leaders]].sum())
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
                run(scheduler, leaders, same, step)
            events = profiler.profiler.kineto_results.events()
            held = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
            most = max(held, default=0)
            self.peaks.append((most, most / scores))

        return profiled


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory or GGUF file; left out: the demo model")
    parser.add_argument("--compression", type=float, default=8.0)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--presets", default=",".join(name for name in PRESETS if name != "full"))
    arguments = parser.parse_args()
    lines = sorted(PROMPTS.read_text(encoding="utf-8").splitlines(), key=len, reverse=True)
    prompts = [json.loads(line)["prompt"] for line in lines[: arguments.requests]]
    scoring = Stopwatch()
    for method in ("accumulate", "store"):
        setattr(
            observer_reference.Observation,
            method,
            scoring.around(getattr(observer_reference.Observation, method)),
        )
    llm = LLM(arguments.model, kv_memory="1GiB", num_accumulators=2, kv_floor=1, enable_prefix_caching=False)
    llm.generate(prompts[0], SamplingParams(max_tokens=2, eviction="kv-compress"))  # warm up

    def run(**options: Any) -> tuple[float, float, float]:
        """Seconds of the run, of scoring, and of rounds."""
        scoring.seconds = 0.0
        start = time.perf_counter()
        outputs = llm.generate(
            prompts,
            SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True, **options),
        )
        total = time.perf_counter() - start
        reports = [output.outputs[0].eviction for output in outputs]
        return total, scoring.seconds, sum(report.seconds for report in reports if report is not None)

    def round_memory(**options: Any) -> tuple[int, float]:
        """Return the bytes of the round that needs most, and how many times those of its scores they are."""
        memory, plain = RoundMemory(), EvictionScheduler._run
        EvictionScheduler._run = memory.around(plain)  # type: ignore[method-assign]
        try:
            llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=2, **options))
        finally:
            EvictionScheduler._run = plain  # type: ignore[method-assign]
        return max(memory.peaks, default=(0, 0.0))

    tokens = sum(len(llm.generate(p, SamplingParams(max_tokens=1))[0].prompt_token_ids) for p in prompts)
    full, _, _ = run()
    table = Table(title=f"eviction at {arguments.compression:g}x, reference backend")
    for column in (
        "preset",
        "scoring s",
        "rounds s",
        "whole run s",
        "overhead",
        "full cache s",
        "round MiB",
        "x scores",
    ):
        table.add_column(column, justify="left" if column == "preset" else "right")
    for name in arguments.presets.split(","):
        takes_none = PRESETS[name].policy.budget.fixed is not None
        options = {"eviction": name} | ({} if takes_none else {"compression": arguments.compression})
        total, scored, planned = run(**options)
        most, multiple = round_memory(**options)
        table.add_row(
            name,
            f"{scored:.2f}",
            f"{planned:.2f}",
            f"{total:.2f}",
            f"{(scored + planned) / total:.1%}",
            f"{full:.2f}",
            f"{most / 2**20:.1f}",
            f"{multiple:.1f}",
        )
    console = Console(width=120)
    console.print(
        f"{arguments.model or 'demo model'}, {len(prompts)} prompts of {tokens / len(prompts):.0f} tokens on average, "
        f"{arguments.tokens} tokens each; {platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
    console.print(table)


if __name__ == "__main__":
    main()
