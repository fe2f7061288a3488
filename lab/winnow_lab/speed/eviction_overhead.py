"""What eviction costs: the share of a run's time that goes into scoring, planning and moving, and memory of rounds.

    python -m winnow_lab.speed.eviction_overhead --presets batch-max

Answers long demo prompts under each preset. Scoring is what the attention pass does for scores,
timed inside it; planning and moving are the rounds, as each answer's `EvictionReport` says. Beside them stand the time
of the whole run, and that of the same run with the full cache. The last two columns are of the round of one prompt that
needed most: bytes of the tensors that lived at once, and these beside the float32 scores that it ranked, which
KV-Compress puts at about 8 (4.2.3).
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from winnow import LLM, SamplingParams
from winnow.attention import observer
from winnow.engine.scheduling.eviction_scheduler import EvictionScheduler
from winnow.eviction import PRESETS
from winnow_lab.checkout import ROOT
from winnow_lab.report.tables import TextTable
from winnow_lab.study import ModelOptions, Result, flag, run_study

PROMPTS = ROOT / "examples" / "demo" / "prompts.jsonl"


@dataclass(frozen=True)
class Options(ModelOptions):
    compression: float = flag(8.0, least=1)
    requests: int = flag(16, least=1)
    tokens: int = flag(128, "tokens of each answer", least=1)
    presets: tuple[str, ...] = flag(tuple(name for name in PRESETS if name != "full"), choices=tuple(PRESETS))


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
            scores = 4 * int(scheduler._memory.ledger.lengths[[each.kv.slot for each in leaders]].sum())
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
                run(scheduler, leaders, same, step)
            events = profiler.profiler.kineto_results.events()
            held = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
            most = max(held, default=0)
            self.peaks.append((most, most / scores))

        return profiled


def study(options: Options) -> Result:
    lines = sorted(PROMPTS.read_text(encoding="utf-8").splitlines(), key=len, reverse=True)
    prompts = [json.loads(line)["prompt"] for line in lines[: options.requests]]
    scoring, observation = Stopwatch(), observer.Observation
    for method in ("accumulate", "store"):
        setattr(observation, method, scoring.around(getattr(observation, method)))
    sizes: dict[str, Any] = {
        "kv_memory": "1GiB",
        "num_accumulators": 2,
        "kv_floor": 1,
        "threads": options.threads,
        "check": 0,
    }
    llm = LLM(options.model, enable_prefix_caching=False, **sizes)
    llm.generate(prompts[0], SamplingParams(max_tokens=2, eviction="kv-compress"))  # warm up

    def run(**own: Any) -> tuple[float, float, float]:
        """Seconds of the run, of scoring, and of rounds."""
        scoring.seconds, start = 0.0, time.perf_counter()
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True, **own)
        )
        total = time.perf_counter() - start
        reports = [output.outputs[0].eviction for output in outputs]
        return total, scoring.seconds, sum(report.seconds for report in reports if report is not None)

    def round_memory(**own: Any) -> tuple[float, float]:
        """Bytes of the round that needs most, and how many times those of its scores they are."""
        memory, plain = RoundMemory(), EvictionScheduler._run
        EvictionScheduler._run = memory.around(plain)  # type: ignore[method-assign]
        try:
            llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=2, **own))
        finally:
            EvictionScheduler._run = plain  # type: ignore[method-assign]
        return max(memory.peaks, default=(0, 0.0))

    tokens = sum(len(llm.generate(p, SamplingParams(max_tokens=1))[0].prompt_token_ids) for p in prompts)
    full, _, _ = run()
    rows = {}
    for name in options.presets:
        takes_none = PRESETS[name].policy.budget.fixed is not None
        own = {"eviction": name} | ({} if takes_none else {"compression": options.compression})
        rows[name] = (*run(**own), full, *round_memory(**own))
    columns: dict[str, Callable[[tuple[float, ...]], str]] = {
        "scoring s": lambda row: f"{row[1]:.2f}",
        "rounds s": lambda row: f"{row[2]:.2f}",
        "whole run s": lambda row: f"{row[0]:.2f}",
        "overhead": lambda row: f"{(row[1] + row[2]) / row[0]:.1%}",
        "full cache s": lambda row: f"{row[3]:.2f}",
        "round MiB": lambda row: f"{row[4] / 2**20:.1f}",
        "x scores": lambda row: f"{row[5]:.1f}",
    }
    facts = [
        f"{options.model or 'demo model'}, {len(prompts)} prompts of {tokens / len(prompts):.0f} tokens on average, "
        f"{options.tokens} tokens each."
    ]
    table = TextTable.of(f"eviction at {options.compression:g}x", "preset", rows, columns)
    return Result("What eviction costs", [table], facts, numbers={"seconds_and_bytes": rows})


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
