"""Fixed work through the engine, and what came of it."""

import hashlib
import json
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from winnow.llm import LLM
from winnow_lab.bench.answering import Answered, OnStep, answer_all, fixed_length
from winnow_lab.bench.presets import Workload

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Pass:
    """The work done once.

    Attributes:
        cpu_seconds: of all threads of the process.
        first_token_seconds: from submission to the first token, the median of all requests.
        running: sequences that held KVs, by step.
        computed_prompt_tokens: more than the prompts hold where a preempted request was computed again.
        kv_bytes_peak: of the engine since its start.
        tokens_sha256: of all answers' token ids: equal work, equal answers.
        decode_step_seconds: median of the steps that computed no token of a prompt; None: there were none.
    """

    workload: Workload
    seconds: float
    cpu_seconds: float
    first_token_seconds: float
    running: tuple[int, ...]
    steps: int
    computed_prompt_tokens: int
    preemptions: int
    eviction_rounds: int
    kv_bytes_freed: int
    parts: dict[str, float]
    kv_bytes_peak: int
    tokens_sha256: str
    decode_step_seconds: float | None = None

    @property
    def output_rate(self) -> float:
        return self.workload.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Tokens of prompts and answers per second."""
        return self.workload.total_tokens / self.seconds

    @property
    def mean_running(self) -> float:
        return statistics.fmean(self.running)

    @property
    def most_running(self) -> int:
        return max(self.running)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["workload"], values["running"]
        derived = ("output_rate", "total_rate", "mean_running", "most_running")
        return values | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class ThroughputReport:
    """The work done several times by one engine; `peak_resident_bytes` are of the whole process."""

    workload: Workload
    passes: tuple[Pass, ...]
    kv_bytes_budget: int
    peak_resident_bytes: int

    def to_json(self) -> dict[str, Any]:
        names = ("seconds", "cpu_seconds", "output_rate", "total_rate", "first_token_seconds")
        return {
            "workload": asdict(self.workload),
            "kv_bytes_budget": self.kv_bytes_budget,
            "peak_resident_bytes": self.peak_resident_bytes,
            "median": {
                name: statistics.median(getattr(each, name) for each in self.passes) for name in names
            },
            "passes": [each.to_json() for each in self.passes],
        }


def measure_throughput(
    llm: LLM, workload: Workload, vocab_size: int, repeat: int, on_step: OnStep
) -> ThroughputReport:
    """Warm up with a tiny request, then do the work `repeat` times."""
    prompts = workload.prompts(vocab_size)
    llm.generate(prompts[0][:_WARM_UP_TOKENS], fixed_length(2))
    passes = tuple(_once(llm, workload, prompts, on_step) for _ in range(repeat))
    # Linux counts in KiB.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    return ThroughputReport(workload, passes, llm.stats().kv_bytes_budget, resident)


def _once(llm: LLM, workload: Workload, prompts: list[list[int]], on_step: OnStep) -> Pass:
    params, begun = fixed_length(workload.new_tokens), time.process_time()
    done = answer_all(llm, [(prompt, params) for prompt in prompts], on_step, final_only=True)
    waits = [output.metrics.time_to_first_token for output in done.outputs]
    return Pass(
        workload=workload,
        seconds=done.seconds,
        cpu_seconds=time.process_time() - begun,
        first_token_seconds=statistics.median(wait for wait in waits if wait is not None),
        running=done.running,
        steps=done.counted("num_steps"),
        computed_prompt_tokens=done.counted("prompt_tokens"),
        preemptions=done.counted("num_preemptions"),
        eviction_rounds=done.counted("num_rounds"),
        kv_bytes_freed=done.counted("kv_bytes_freed"),
        parts=done.parts,
        kv_bytes_peak=done.steps[-1].stats.kv_bytes_peak,
        tokens_sha256=hashlib.sha256(json.dumps(done.answers).encode()).hexdigest(),
        decode_step_seconds=_decode_step(done),
    )


def _decode_step(done: Answered) -> float | None:
    steps = [
        after.seconds - before.seconds
        for before, after in pairwise(done.steps)
        if after.stats.prompt_tokens == before.stats.prompt_tokens
    ]
    return statistics.median(steps) if steps else None


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, least and most."""
    return statistics.median(values), min(values), max(values)
