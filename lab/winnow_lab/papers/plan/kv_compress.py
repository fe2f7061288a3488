"""KV-Compress: vLLM 0.6.0, eager, 256 prompts at once, 500 new tokens each."""

from dataclasses import replace

from winnow.cache import CacheSize
from winnow.config import EvictionConfig, SchedulerConfig
from winnow_lab.bench.traces import TraceRequest
from winnow_lab.papers.plan.comparison import Comparison, comparison_table
from winnow_lab.plan.deployment import Deployment
from winnow_lab.plan.hardware import HARDWARE
from winnow_lab.plan.models import MODELS
from winnow_lab.plan.simulated_engine import EngineSetup
from winnow_lab.plan.simulation import Simulation, simulate
from winnow_lab.report.tables import TextTable

_LIMIT = {"L4": 19_000, "H100": 33_000}
"""The printed max-model-len of each card. vLLM refuses one that its cache cannot hold, so the cache holds as much."""
_H100_FP8 = replace(HARDWARE["H100"], compute=2 * HARDWARE["H100"].compute)
"""Products of the FP8 model run at twice the rate of 16-bit ones."""
_CHUNK = 512
"""Tokens of a step on the H100: vLLM 0.6.0 computes prompts in chunks by default where max-model-len exceeds 32k."""
_NEW = 500
_REQUESTS = 256
KV_COMPRESS = (
    ("L4", 6000, 32, 4.93),
    ("L4", 6000, 64, 5.18),
    ("L4", 500, 2, 2.0),
    ("L4", 500, 4, 2.54),
    ("H100", 6000, 8, 1.8),
    ("H100", 6000, 64, 2.14),
)
"""Card, prompt tokens, compression rate, printed throughput over vLLM's; the H100's prompt length is not printed."""
_FITTED = KV_COMPRESS[0]


def _deployment(card: str, compression: float | None, ranking: float) -> Deployment:
    eviction = EvictionConfig()
    if compression is not None:
        eviction = EvictionConfig(eviction="kv-compress", compression=compression, kv_floor=128)
    small = card == "L4"
    deployment = Deployment(
        MODELS["llama-3.1-8b" if small else "llama-3.1-70b"],
        HARDWARE[card] if small else _H100_FP8,
        weight_bits=None if small else 8,
        eviction=eviction,
        scheduler=SchedulerConfig(_REQUESTS, _LIMIT[card] if small else _CHUNK, None if small else _CHUNK),
        utilization=0.9 if small else 0.96,
    )
    # Its cost is one of software, the same for each KV; the model of time has it in readings of the KVs.
    read = deployment.kv_token_bytes / deployment.hardware.bandwidth
    factor = ranking * deployment.model.rows / read
    return replace(deployment, factors=replace(deployment.times.factors, ranked=factor))


def kv_compress_run(card: str, prompt: int, compression: float | None, ranking: float = 0.0) -> Simulation:
    """The paper's benchmark; `compression` None: vLLM. `ranking`: seconds that a round takes for each KV it ranks."""
    deployment = _deployment(card, compression, ranking)
    layout, longest = deployment.layout, _LIMIT[card]
    least = CacheSize.of_blocks(layout, layout.blocks_for(longest), _REQUESTS, longest).nbytes(layout)
    setup = EngineSetup.of(deployment, max(deployment.kv_room, least), longest, prefix_caching=False)
    return simulate(deployment, setup, [TraceRequest(0.0, prompt, _NEW)] * _REQUESTS)


def fitted_ranking(baseline: float) -> float:
    """Seconds for each KV ranked, by one printed row; `baseline`: seconds of vLLM there."""
    card, prompt, rate, printed = _FITTED
    free = kv_compress_run(card, prompt, rate)
    ranked = free.work.round_kvs * _deployment(card, rate, 0.0).model.rows
    return (baseline / printed - free.seconds) / ranked


def kv_compress() -> TextTable:
    """Throughput multipliers of KV-Compress on the L4 and the H100, by simulation."""
    base: dict[tuple[str, int], float] = {}
    rows, ranking = [], 0.0
    for card, prompt, rate, printed in KV_COMPRESS:
        if (card, prompt) not in base:
            base[card, prompt] = kv_compress_run(card, prompt, None).seconds
            ranking = ranking or fitted_ranking(base[card, prompt])
        ratio = base[card, prompt] / kv_compress_run(card, prompt, rate, ranking).seconds
        rows.append(Comparison(f"{card}, {prompt} tokens, {rate}x", printed, ratio))
    return comparison_table(
        "KV-Compress: throughput over vLLM 0.6.0 (256 prompts, 500 new tokens)",
        "ratio",
        rows,
        (
            "Simulated with the engine's scheduler, uncalibrated but for one constant: to the first row is fitted what",
            f"a compression costs, {ranking * 1e9:.0f} ns for each KV that it ranks, whatever the card: it is an eager "
            "sort.",
            "The cache holds max-model-len at least, as vLLM demands; on the H100 that is beyond 32k, where it takes",
            f"prompts in chunks of {_CHUNK}. Cause of what is left: the H100's prompt length is not printed.",
        ),
    )
