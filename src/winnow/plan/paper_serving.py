"""The text's table of serving throughput: each step of its stack, simulated with the engine's own scheduler."""

import random
from dataclasses import dataclass, replace

from winnow.bench.traces import TraceRequest
from winnow.config import SchedulerConfig
from winnow.plan.deployment import Deployment
from winnow.plan.hardware import HARDWARE
from winnow.plan.models import MODELS
from winnow.plan.simulated_engine import EngineSetup
from winnow.plan.simulation import simulate
from winnow.plan.simulation_report import summary
from winnow.report.tables import TextTable

_RESERVED = 8192
"""Tokens that a contiguous cache reserves for each request: the text's longest sequence."""
_MEAN_PROMPT, _MEAN_NEW, _SHARED = 1024, 512, 512
_REQUESTS = 400


@dataclass(frozen=True)
class Configuration:
    """A row: bits of an element of KVs, and what the text prints.

    Attributes:
        contiguous: whole sequences are reserved, so as many run as fit at full length.
    """

    label: str
    bits: int
    contiguous: bool
    prefix_cache: bool
    printed_batch: int
    printed_rate: int


STACK = (
    Configuration("contiguous FP16", 16, True, False, 24, 420),
    Configuration("paged FP16", 16, False, False, 58, 780),
    Configuration("paged INT8", 8, False, False, 96, 1050),
    Configuration("paged INT8 + prefix cache", 8, False, True, 96, 1180),
    Configuration("paged INT4 + prefix cache", 4, False, True, 140, 1420),
)


def workload(count: int = _REQUESTS, seed: int = 0) -> list[TraceRequest]:
    """Requests of the text's mean lengths, exponentially drawn, all there from the start; prompts begin alike."""
    generator = random.Random(seed)  # noqa: S311

    def length(mean: float, most: int) -> int:
        return min(max(round(generator.expovariate(1 / mean)), 1), most)

    requests = []
    for _ in range(count):
        prompt = _SHARED + length(_MEAN_PROMPT - _SHARED, _RESERVED // 2)
        requests.append(
            TraceRequest(0.0, prompt, length(_MEAN_NEW, _RESERVED // 2 - _SHARED), (0,), block_tokens=_SHARED)
        )
    return requests


def stack() -> TextTable:
    """Batch and throughput of each configuration, in the memory that holds the text's 24 contiguous sequences."""
    model = MODELS["llama-3-70b"]
    pool = STACK[0].printed_batch * model.kv_elements(_RESERVED) * 2
    rows, before = [], None
    for row in STACK:
        # Fewer channels of 16 bits take the bytes of all of them with fewer bits.
        stored = replace(model, head_dim=model.head_dim * row.bits // 16)
        most = STACK[0].printed_batch if row.contiguous else 256
        deployment = Deployment(stored, HARDWARE["A100"], 4, scheduler=SchedulerConfig(most))
        setup = EngineSetup.of(deployment, pool, _RESERVED, prefix_caching=row.prefix_cache)
        values = summary(simulate(deployment, setup, workload()))
        rate = values["output_rate"]
        rows.append(
            (
                row.label,
                (
                    f"{values['mean_running']:.0f}",
                    f"{row.printed_batch}",
                    f"{rate:.0f}",
                    f"{row.printed_rate}",
                    "" if before is None else f"{rate / before[0]:.2f}x",
                    "" if before is None else f"{row.printed_rate / before[1]:.2f}x",
                ),
            )
        )
        before = rate, row.printed_rate
    return TextTable(
        "Serving throughput (Llama 3 70B, 4 A100, 1024 + 512 tokens on average)",
        "configuration",
        ("running", "printed", "tokens/s", "printed", "gain", "printed"),
        tuple(rows),
        (
            f"Simulated, uncalibrated: {_REQUESTS} requests at once, lengths exponentially drawn, {_SHARED} tokens of",
            f"each prompt shared; KV memory for the {STACK[0].printed_batch} contiguous sequences of {_RESERVED} "
            "tokens that are printed.",
            "More run than printed: the text's batches stop short of what its memory holds.",
        ),
    )
