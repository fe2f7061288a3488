"""KV-Compress: vLLM 0.6.0, eager, 256 prompts at once, 500 new tokens each."""

from winnow.bench.traces import TraceRequest
from winnow.config import EvictionConfig, SchedulerConfig
from winnow.plan.deployment import Deployment
from winnow.plan.hardware import HARDWARE
from winnow.plan.models import MODELS
from winnow.plan.papers.comparison import Comparison, comparison_table
from winnow.plan.simulated_engine import EngineSetup
from winnow.plan.simulation import simulate
from winnow.report.tables import TextTable

_KVC_NEW = 500
_KVC_REQUESTS = 256
KV_COMPRESS = (
    ("L4", 6000, 32, 4.93),
    ("L4", 6000, 64, 5.18),
    ("L4", 500, 2, 2.0),
    ("L4", 500, 4, 2.54),
    ("H100", 6000, 8, 1.8),
    ("H100", 6000, 64, 2.14),
)
"""Card, prompt tokens, compression rate, printed throughput over vLLM's."""


def _kvc_deployment(card: str, compression: float | None) -> Deployment:
    eviction = EvictionConfig()
    if compression is not None:
        eviction = EvictionConfig(eviction="kv-compress", compression=compression, kv_floor=128)
    small = card == "L4"
    limit = 19_000 if small else 33_000
    return Deployment(
        MODELS["llama-3.1-8b" if small else "llama-3.1-70b"],
        HARDWARE[card],
        weight_bits=None if small else 8,
        eviction=eviction,
        scheduler=SchedulerConfig(_KVC_REQUESTS, limit, None),
        utilization=0.9 if small else 0.96,
    )


def kv_compress_seconds(card: str, prompt: int, compression: float | None) -> float:
    """Simulated seconds of the paper's benchmark; compression None: vLLM without eviction."""
    deployment = _kvc_deployment(card, compression)
    # Activations of a step of whole prompts, as vLLM reserves them: it profiles with the longest.
    longest = deployment.scheduler.max_num_batched_tokens
    setup = EngineSetup.of(deployment, max_model_len=longest, prefix_caching=False)
    trace = [TraceRequest(0.0, prompt, _KVC_NEW)] * _KVC_REQUESTS
    return simulate(deployment, setup, trace).seconds


def kv_compress() -> TextTable:
    """Throughput multipliers of KV-Compress on the L4 and the H100, by simulation."""
    base: dict[tuple[str, int], float] = {}
    rows = []
    for card, prompt, rate, printed in KV_COMPRESS:
        if (card, prompt) not in base:
            base[card, prompt] = kv_compress_seconds(card, prompt, None)
        ratio = base[card, prompt] / kv_compress_seconds(card, prompt, rate)
        rows.append(Comparison(f"{card}, {prompt} tokens, {rate}x", printed, ratio))
    return comparison_table(
        "KV-Compress: throughput over vLLM 0.6.0 (256 prompts, 500 new tokens)",
        "ratio",
        rows,
        (
            "Simulated with the engine's scheduler, uncalibrated. Cause of errors: the paper does not print the H100's",
            "prompt length (6000 is assumed; the gain falls with it), its 70B compresses eagerly with a sort whose",
            "workspace is 8 times its input, and its H100 cannot keep all the room that 96 % leave.",
        ),
    )
