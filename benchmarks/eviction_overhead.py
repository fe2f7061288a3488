"""What eviction costs: the share of a run's time that goes into scoring, planning and moving.

    python benchmarks/eviction_overhead.py [--compression 8] [--requests 16] [--tokens 128] [--presets a,b,c]

Answers long demo prompts with the demo model under each preset. Scoring is what the attention pass does for scores,
timed inside it; planning and moving are the rounds, as each answer's `EvictionReport` says. Beside them stand the time
of the whole run, and that of the same run with the full cache.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from winnow import LLM, SamplingParams
from winnow.attention import observer_reference
from winnow.eviction import PRESETS

PROMPTS = Path(__file__).parent.parent / "examples" / "demo" / "prompts.jsonl"


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    llm = LLM(kv_memory="1GiB", num_accumulators=2, kv_floor=1, enable_prefix_caching=False)
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

    tokens = sum(len(llm.generate(p, SamplingParams(max_tokens=1))[0].prompt_token_ids) for p in prompts)
    full, _, _ = run()
    table = Table(title=f"eviction at {arguments.compression:g}x, reference backend")
    for column in ("preset", "scoring s", "rounds s", "whole run s", "overhead", "full cache s"):
        table.add_column(column, justify="left" if column == "preset" else "right")
    for name in arguments.presets.split(","):
        takes_none = PRESETS[name].policy.budget.fixed is not None
        total, scored, planned = run(
            eviction=name, **({} if takes_none else {"compression": arguments.compression})
        )
        table.add_row(
            name,
            f"{scored:.2f}",
            f"{planned:.2f}",
            f"{total:.2f}",
            f"{(scored + planned) / total:.1%}",
            f"{full:.2f}",
        )
    console = Console(width=100)
    console.print(
        f"demo model, {len(prompts)} prompts of {tokens / len(prompts):.0f} tokens on average, {arguments.tokens} "
        f"tokens each; {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    console.print(table)


if __name__ == "__main__":
    main()
