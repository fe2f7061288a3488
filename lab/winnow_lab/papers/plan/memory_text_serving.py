"""The text's tables of serving, simulated with the engine's own scheduler: the stack, watermarks, tenants."""

import random
from dataclasses import dataclass, replace

from winnow.config import CacheConfig, SchedulerConfig
from winnow_lab.bench.traces import TraceRequest
from winnow_lab.plan.deployment import Deployment
from winnow_lab.plan.hardware import HARDWARE
from winnow_lab.plan.models import MODELS
from winnow_lab.plan.simulated_engine import EngineSetup
from winnow_lab.plan.simulation import simulate
from winnow_lab.plan.simulation_report import summary
from winnow_lab.report.tables import TextTable

_RESERVED = 8192
"""Tokens that a contiguous cache reserves for each request: the text's longest sequence."""
_MEAN_PROMPT, _MEAN_NEW, _SHARED = 1024, 512, 512
_REQUESTS = 400
_MOST_SEQS = 256


@dataclass(frozen=True)
class Configuration:
    """A row: how KVs are stored, and what the text prints."""

    label: str
    cache: CacheConfig
    printed_batch: int
    printed_rate: int
    printed_token_ms: tuple[int, int]
    """p50 and p99."""
    printed_use: int
    """In per cent."""


_PLAIN = CacheConfig(enable_prefix_caching=False)
STACK = (
    Configuration("contiguous FP16", replace(_PLAIN, kv_reservation="max"), 24, 420, (85, 350), 55),
    Configuration("paged FP16", _PLAIN, 58, 780, (72, 180), 82),
    Configuration("paged INT8", replace(_PLAIN, kv_cache_dtype="int8"), 96, 1050, (65, 160), 88),
    Configuration("paged INT8 + prefix cache", CacheConfig(kv_cache_dtype="int8"), 96, 1180, (55, 145), 90),
    Configuration("paged INT4 + prefix cache", CacheConfig(kv_cache_dtype="int4"), 140, 1420, (52, 155), 91),
)


def workload(count: int, seed: int = 0) -> list[TraceRequest]:
    """Requests of the text's mean lengths, exponentially drawn, all there from the start; prompts begin alike."""
    generator = random.Random(seed)

    def length(mean: float, most: int) -> int:
        return min(max(round(generator.expovariate(1 / mean)), 1), most)

    requests = []
    for _ in range(count):
        prompt = _SHARED + length(_MEAN_PROMPT - _SHARED, _RESERVED // 2)
        requests.append(
            TraceRequest(0.0, prompt, length(_MEAN_NEW, _RESERVED // 2 - _SHARED), (0,), block_tokens=_SHARED)
        )
    return requests


def stack(requests: int = _REQUESTS) -> TextTable:
    """Batch and throughput of each configuration, in the memory that holds the text's 24 contiguous sequences."""
    model = MODELS["llama-3-70b"]
    pool = STACK[0].printed_batch * model.kv_elements(_RESERVED) * 2
    lines, before = [], None
    for row in STACK:
        deployment = Deployment(
            model, HARDWARE["A100"], 4, cache=row.cache, scheduler=SchedulerConfig(_MOST_SEQS)
        )
        setup = EngineSetup.of(deployment, pool, _RESERVED, prefix_caching=row.cache.enable_prefix_caching)
        values = summary(simulate(deployment, setup, workload(requests)))
        rate = values["output_rate"]
        gains = f"{rate / before[0]:.2f}x | {row.printed_rate / before[1]:.2f}x" if before else " | "
        batches = f"{values['mean_running']:.0f} | {row.printed_batch}"
        lines.append(f"{row.label} | {batches} | {rate:.0f} | {row.printed_rate} | {gains}")
        before = rate, row.printed_rate
    return TextTable.read(
        "Serving throughput (Llama 3 70B, 4 A100, 1024 + 512 tokens on average)",
        "configuration | running | printed | tokens/s | printed | gain | printed",
        lines,
        [
            f"Simulated, uncalibrated: {requests} requests at once, lengths exponentially drawn, {_SHARED} tokens of",
            f"each prompt shared; KV memory for the {STACK[0].printed_batch} contiguous sequences of {_RESERVED} "
            "tokens that are printed.",
            "More run than printed: the text's batches stop short of what its memory holds.",
        ],
    )


WATERMARKS = (
    (0.70, 42, 580, 0.0, 120),
    (0.85, 54, 720, 0.2, 135),
    (0.90, 58, 760, 1.5, 180),
    (0.95, 61, 780, 8.0, 450),
    (0.98, 63, 790, 25.0, 1200),
)
"""Watermark, printed batch, tokens/s, preemptions a minute, p99 latency in ms."""
_LOAD = 4.0
"""Requests a second, for as long as they last: more than are served, so that admission decides."""
_WATERMARK_SEQS = 6
"""Contiguous sequences that its memory holds: batches are then as large as printed, and decoding binds."""


def mixed(requests: int) -> list[TraceRequest]:
    """The workload, every other request with a quarter of its prompt and an answer of three times the length."""
    return [
        replace(
            each,
            arrival=index / _LOAD,
            prompt_tokens=each.prompt_tokens if index % 2 else max(each.prompt_tokens // 4, 1),
            output_tokens=each.output_tokens if index % 2 else 3 * each.output_tokens,
        )
        for index, each in enumerate(workload(requests))
    ]


def watermark(requests: int = _REQUESTS // 2) -> TextTable:
    """Admission up to a part of the blocks, under a load that fills them."""
    model = MODELS["llama-3-70b"]
    pool, trace = _WATERMARK_SEQS * model.kv_elements(_RESERVED) * 2, mixed(requests)
    lines = []
    for part, printed_batch, printed_rate, printed_preempted, printed_p99 in WATERMARKS:
        scheduler = SchedulerConfig(256, watermark_high=part)
        deployment = Deployment(model, HARDWARE["A100"], 4, scheduler=scheduler)
        setup = EngineSetup.of(deployment, pool, _RESERVED, prefix_caching=False)
        simulation = simulate(deployment, setup, trace)
        values = summary(simulation)
        preempted = sum(simulation.preemptions.values()) / simulation.seconds * 60
        most = max(sample.running for history in simulation.histories for sample in history)
        rates = f"{most} | {printed_batch} | {values['output_rate']:.0f} | {printed_rate}"
        late = f"{values['tpot']['p99'] * 1e3:.0f} | {printed_p99}"
        lines.append(f"{part:.0%} | {rates} | {preempted:.1f} | {printed_preempted:g} | {late}")
    return TextTable.read(
        "Watermarks (Llama 3 70B, 4 A100, mixed lengths)",
        "admit up to | batch | printed | tokens/s | printed | preempted/min | printed | p99 ms/token | printed",
        lines,
        [
            f"Simulated, uncalibrated: {requests} requests, {_LOAD:g} a second, short prompts with long answers",
            f"among them, in memory for {_WATERMARK_SEQS} contiguous ones. Requests join up to the watermark; in the",
            "text's code the names of the two are swapped. Running requests are promised their next blocks, so",
            "fewer are preempted.",
        ],
    )


TENANTS = (("tenant_a", 0.6), ("tenant_b", 0.3))
"""The text's example: guaranteed parts of the blocks; the rest is shared."""


def tenants(requests: int = _REQUESTS // 2) -> TextTable:
    """What each tenant gets of the text's example, alone and beside the other."""
    model = MODELS["llama-3-70b"]
    pool = STACK[0].printed_batch * model.kv_elements(_RESERVED) * 2
    quotas = {name: {"guarantee": part} for name, part in TENANTS}
    scheduler = SchedulerConfig(256, scheduling_policy="fair", tenants=quotas)
    deployment = Deployment(model, HARDWARE["A100"], 4, scheduler=scheduler)
    setup = EngineSetup.of(deployment, pool, _RESERVED, prefix_caching=False)
    names = [name for name, _ in TENANTS]
    lines = []
    for label, active in (("a alone", names[:1]), ("b alone", names[1:]), ("both, equal load", names)):
        simulation = simulate(deployment, setup, workload(requests), tenants=active)
        entries = [label]
        for name, part in TENANTS:
            tokens = sum(each.output_tokens for each in simulation.served if each.tenant == name)
            entries.append(f"{part:.0%} | {tokens / simulation.seconds:.0f}")
        lines.append(" | ".join([*entries, f"{simulation.kv_bytes_peak / simulation.kv_bytes:.0%}"]))
    return TextTable.read(
        "Tenants: guarantees of 60 % and 30 %, the rest shared (Llama 3 70B, 4 A100)",
        "load | a guaranteed | a tokens/s | b guaranteed | b tokens/s | memory used at most",
        lines,
        [
            "Simulated, uncalibrated. In the text's code the shared pool is never lent; here a tenant borrows what is",
            "free, the other's guarantee too, and gives it back first.",
        ],
    )
