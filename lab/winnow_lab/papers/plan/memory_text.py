"""The tables of the text on KV cache memory, computed: each beside what it prints, where that is a misprint or rounded.

Lines of the text count a GB of KVs as 2**30 bytes and of weights as 10**9; so do these tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from winnow.cache import CacheLayout
from winnow.cache.layout import ceil_div
from winnow_lab.papers.plan.memory_text_serving import stack, tenants, watermark
from winnow_lab.plan.hardware import GB, GIB, HARDWARE
from winnow_lab.plan.models import MODELS, ModelShape
from winnow_lab.report.tables import TextTable

_BLOCK = 16
_70B = MODELS["llama-3-70b"]
_A100S = 4
"""A100 80GB that hold the 70B model in the text's examples."""


def kv_gib(model: ModelShape, tokens: int, batch: int, element_bytes: float = 2.0) -> float:
    """GiB of the keys and values of `batch` sequences: the text's formula."""
    return model.kv_elements(tokens) * batch * element_bytes / GIB


MEMORY = (
    ("Llama 3 8B", "llama-3-8b", 32, 4.0),
    ("Mistral 7B", "mistral-7b", 32, 4.0),
    ("Llama 3 70B", "llama-3-70b", 32, 10.0),
    ("Llama 3 70B (batch=64)", "llama-3-70b", 64, 20.0),
    ("Llama 3 70B (batch=128)", "llama-3-70b", 128, 40.0),
    ("Llama 3 405B", "llama-3.1-405b", 32, 15.8),
    ("GPT-4 class (est.)", "gpt-4-class", 32, 30.0),
)
"""The table of models: label, model, batch, printed GB of KVs."""


def memory() -> TextTable:
    lines = []
    for label, name, batch, printed in MEMORY:
        model = MODELS[name]
        kvs, weights = kv_gib(model, 4096, batch), 2 * model.num_params / GB
        shape = f"{model.num_layers} | {model.num_kv_heads} | {model.head_dim} | {weights:.0f}"
        lines.append(f"{label} | {shape} | {kvs:.0f} | {printed:g} | {kvs * GIB / (weights * GB):.0%}")
    return TextTable.read(
        "KV cache of popular models (batch 32 unless said, 4096 tokens, FP16)",
        "model | layers | KV heads | head dim | weights GB | KVs GiB | printed | KVs/weights",
        lines,
        [
            "The printed sizes contradict the text's own formula, which these follow; its worked example is right."
        ],
    )


def batch() -> TextTable:
    printed = {1: 0.31, 8: 2.5, 16: 5, 32: 10, 64: 20, 128: 40, 256: 80}
    weights = 2 * _70B.num_params
    return TextTable.read(
        "KV cache against batch (Llama 3 70B, 4096 tokens, FP16)",
        "batch | KVs GiB | printed | weights GB",
        (f"{n} | {kv_gib(_70B, 4096, n):.4g} | {said:g} | {weights / GB:.0f}" for n, said in printed.items()),
        [f"KVs exceed the weights from a batch of {ceil_div(weights, _70B.kv_elements(4096) * 2)} on."],
    )


def heads() -> TextTable:
    """What heads that share KVs save: the 70B model as it is, and if each query head had KVs of its own."""
    counts = {_70B.num_kv_heads: "80", _70B.num_query_heads: "640"}
    sizes = {count: kv_gib(replace(_70B, num_kv_heads=count), 4096, 64) for count in counts}
    return TextTable.read(
        "KV heads of a model (Llama 3 70B, 4096 tokens, batch 64, FP16)",
        "heads | GiB | printed",
        (f"{count} | {sizes[count]:g} | {said}" for count, said in counts.items()),
    )


def layout() -> TextTable:
    total, weights = 80 * _A100S, 2 * _70B.num_params / GB
    kvs, pool = kv_gib(_70B, 4096, 64), 48
    tokens = int(pool * GIB / _70B.kv_elements())
    table = TextTable.read(
        f"Memory of {_A100S} A100 80GB, {total} GB (Llama 3 70B)",
        "part, GB | FP16 KVs, batch 64 | printed | INT8 KVs | printed",
        [
            f"weights (FP16) | {weights:.0f} | 140 | {weights:.0f} | 140",
            f"KV cache | {kvs:.0f} | 80 | {pool} | 48",
            "prefix cache | 0 | | 10 | 10",
            "activations and workspace | 20 | 20 | 12 | 12",
            f"left | {total - weights - kvs - 20:.0f} | 80 | {total - weights - pool - 22:.0f} | 10",
        ],
        [
            f"FP16: 4096 tokens each. The INT8 pool holds {tokens} tokens: 96 sequences of {tokens // 96}, or "
            f"{tokens // 1536} of 1536.",
            "The printed parts of the second column add up to 220 GB: the headroom is what is left of 320.",
        ],
    )
    return replace(table, across="KVs")


WASTE = (
    ("ShareGPT (chat)", 830, 4096, 80),
    ("Alpaca (instruction)", 380, 2048, 81),
    ("Code generation", 1200, 4096, 71),
    ("Summarization", 2800, 4096, 32),
)
"""Workload, average length, reserved length, printed waste in percent."""


def waste() -> TextTable:
    """What contiguous reservation leaves unused, and what blocks do."""
    lines = []
    for name, used, reserved, printed in WASTE:
        part, blocks = used / reserved, ceil_div(used, _BLOCK) * _BLOCK
        inside = f"{1 - used / blocks:.1%} | {(_BLOCK - 1) / 2 / used:.1%}"
        lines.append(f"{name} | {used} | {reserved} | {part:.0%} | {1 - part:.0%} | {printed}% | {inside}")
    shares = [1 - used / reserved for _, used, reserved, _ in WASTE]
    lines.append(f"mean | | | | {sum(shares) / len(shares):.0%} | 68% | | ")
    return TextTable.read(
        "Waste of contiguous reservation, and of blocks of 16",
        "workload | average | reserved | used | waste | printed | in blocks | expected in blocks",
        lines,
        [
            "In blocks: at exactly the average length; expected: half a block less half a token of lengths that vary.",
            "At 800 tokens the worst case of blocks is 15/800 = 1.9 %, printed as below 0.4 %.",
        ],
    )


class BlockOverhead(NamedTuple):
    """What the text prints for a block size, in per cent."""

    unused: float
    table: float

    @property
    def whole(self) -> float:
        return self.unused + self.table


BLOCK_OVERHEADS = {
    1: BlockOverhead(0, 8),
    4: BlockOverhead(0.5, 3.5),
    8: BlockOverhead(1, 1.8),
    16: BlockOverhead(1.8, 1),
    32: BlockOverhead(3.2, 0.6),
    64: BlockOverhead(5.5, 0.3),
    128: BlockOverhead(9, 0.2),
}
"""By slots."""


def blocks() -> TextTable:
    """Waste and tables against the block size, for rows of the mixed workload."""
    mean = sum(used for _, used, _, _ in WASTE) / len(WASTE)
    lines = []
    for size, said in BLOCK_OVERHEADS.items():
        shape = CacheLayout.even(_70B.num_layers, _70B.num_kv_heads, _70B.head_dim, size, "float16")
        fragmentation = (size - 1) / 2 / (mean + (size - 1) / 2)
        lines.append(f"{size} | {fragmentation:.2%} | {said.unused:g}% | {4 / shape.block_bytes:.3%}")
    return TextTable.read(
        f"Block size (Llama 3 70B, {mean:.0f} tokens on average)",
        "slots | unused in last blocks | printed | table entries",
        lines,
        [
            "Of blocks of one head and layer with tables of int32; the printed 8 % of tables at 1 slot is no memory,",
            "but the cost of a kernel that follows them.",
        ],
    )


def beams(tokens: int = 2048, width: int = 4, diverged: int = 50) -> TextTable:
    """Blocks of beam search, with and without copy-on-write."""
    whole = ceil_div(tokens, _BLOCK)
    shared = whole + (width - 1) * ceil_div(diverged, _BLOCK)
    return TextTable.read(
        f"Beam search: {width} beams of {tokens} tokens that part in the last {diverged}",
        "allocation | blocks | of one | printed",
        [
            f"one sequence | {whole} | 1.00x | ",
            f"copies | {width * whole} | {width:.2f}x | 4x",
            f"copy-on-write | {shared} | {shared / whole:.2f}x | 1.05x",
        ],
    )


QUANTIZED = (
    ("FP16", 2.0, "80", "0%"),
    ("INT8", 1.0, "40", "< 0.1%"),
    ("INT4 (grouped)", 0.5, "20", "0.3-1.0%"),
    ("INT4 + FP16 outliers", 0.6, "24", "< 0.2%"),
    ("INT3", 0.375, "15", ""),
    ("INT2", 0.25, "10", "2-5%"),
)
"""Precision, bytes of an element, printed GB, printed loss of perplexity."""
_SCALES = {"INT8": 2 / 128, "INT4 (grouped)": 4 / 32, "INT3": 4 / 32, "INT2": 4 / 32}
"""Bytes of scales and zeros per element: a float16 scale a head at 8 bits, scale and zero per 32 below."""


def quantization() -> TextTable:
    lines = []
    for name, size, printed, loss in QUANTIZED:
        plain, scaled = (kv_gib(_70B, 4096, 64, each) for each in (size, size + _SCALES.get(name, 0.0)))
        lines.append(f"{name} | {size:g} | {plain:.0f} | {printed} | {2 / size:.3g}x | {scaled:.1f} | {loss}")
    return TextTable.read(
        "Quantized KVs (Llama 3 70B, batch 64, 4096 tokens)",
        "precision | bytes/element | GiB | printed | savings | with scales | printed loss",
        lines,
        [
            "With scales: a float16 per head at 8 bits, a scale and a zero per 32 channels below. Of the systems",
            "for outliers KVQuant and GEAR keep them; KIVI does not. Losses are the text's, not measured here.",
        ],
    )


EVICTED = (
    ("Full cache", 4096, 100, "5.12", "full"),
    ("Random eviction", 1024, 25, "7.85", "random"),
    ("Recent-only", 1024, 25, "6.41", "recent"),
    ("Attention sinks (4+1020)", 1024, 25, "5.38", "streaming"),
    ("H2O", 1024, 25, "5.24", "h2o"),
    ("H2O + sinks", 1024, 25, "5.19", "h2o, sinks=4"),
)
"""Policy, tokens kept, printed percent, printed perplexity, the preset here."""


def eviction() -> TextTable:
    whole, *_ = sizes = [kv_gib(MODELS["llama-3-8b"], kept, 1) for _, kept, *_ in EVICTED]
    return TextTable.read(
        "Eviction (Llama 3 8B, 4096 tokens generated, budget 1024)",
        "policy | kept | GiB | memory | printed | printed ppl | preset",
        (
            f"{name} | {kept} | {size:.3f} | {size / whole:.0%} | {printed}% | {perplexity} | {preset}"
            for size, (name, kept, printed, perplexity, preset) in zip(sizes, EVICTED, strict=True)
        ),
        ["Perplexities are the text's; `winnow eval perplexity` measures a model's own."],
        words=(5,),
    )


BANDWIDTH = ((1, 0.6, 70), (8, 5.0, 73), (32, 20.0, 80), (64, 40.0, 90), (128, 80.0, 110), (256, 160.0, 150))
"""Batch, printed GB of KVs, printed milliseconds."""


def bandwidth() -> TextTable:
    """Bytes that a decode step of the 70B model reads, and how long that takes."""
    rate, weights = HARDWARE["A100"].bandwidth, 2 * _70B.num_params
    lines = []
    for size, printed, printed_ms in BANDWIDTH:
        kvs = kv_gib(_70B, 2048, size) * GIB
        total = weights + kvs
        reads = f"{weights / GB:.0f} | {kvs / GIB:.1f} | {printed:g} | {kvs / total:.1%}"
        lines.append(f"{size} | {reads} | {total / (rate * _A100S) * 1e3:.1f} | {printed_ms}")
    return TextTable.read(
        f"Reads of a decode step (Llama 3 70B, 2048 tokens, {_A100S} A100)",
        "batch | weights GB | KVs GiB | printed | KVs of all | ms | printed",
        lines,
        [
            f"At {rate / GB:.0f} GB/s each, over the {_A100S} that hold the weights; the printed times take",
            "one device's 2 TB/s. 16-bit KVs.",
        ],
    )


THROUGHPUT = {
    1: (14, 14, 14),
    8: (100, 105, 107),
    32: (350, 370, 385),
    64: (580, 640, 670),
    128: (850, 980, 1050),
    256: (1050, 1320, 1500),
}
"""Batch -> printed tokens per second with FP16, INT8 and INT4 KVs."""


def throughput() -> TextTable:
    """Tokens per second against the batch, by precision: what reading allows."""
    rate = HARDWARE["A100"].bandwidth * _A100S
    lines = []
    for size, printed in THROUGHPUT.items():
        reads = (2 * _70B.num_params + kv_gib(_70B, 2048, size, each) * GIB for each in (2.0, 1.0, 0.5))
        pairs = zip(reads, printed, strict=True)
        lines.append(" | ".join([f"{size}", *(f"{size * rate / read:.0f} | {said}" for read, said in pairs)]))
    return TextTable.read(
        f"Decode throughput against batch, tokens/s (Llama 3 70B, 2048 tokens, {_A100S} A100)",
        "batch | FP16 | printed | INT8 | printed | INT4 | printed",
        lines,
        [
            "A bound: nothing but reading weights and KVs. Printed: one device, which cannot hold the weights,",
            "and less at large batches than that bandwidth gives.",
        ],
    )


SWAP = (
    (128, 0.005, 0.2, 15),
    (512, 0.02, 0.8, 55),
    (2048, 0.08, 3.2, 210),
    (8192, 0.31, 12.4, 830),
    (32768, 1.25, 50.0, 3300),
)
"""Tokens, printed GB, printed ms of swapping, printed ms of recomputing."""


def swap() -> TextTable:
    """Swap or recompute, by length, over 25 GB/s."""
    gpu = HARDWARE["A100"]
    lines = []
    for tokens, printed_gb, printed_ms, printed_recompute in SWAP:
        num_bytes = _70B.kv_elements(tokens) * 2
        flops = 2 * _70B.active_params * tokens
        flops += 2 * _70B.num_layers * _70B.num_query_heads * _70B.head_dim * tokens**2
        seconds = flops / (gpu.compute * _A100S * 0.45)
        seconds = max(seconds, 2 * _70B.num_params / (gpu.bandwidth * _A100S))
        back = num_bytes / (25 * GB)
        moved = f"{num_bytes / GIB:.3f} | {printed_gb:g} | {back * 1e3:.1f} | {printed_ms:g}"
        again = f"{seconds * 1e3:.0f} | {printed_recompute}"
        lines.append(f"{tokens} | {moved} | {again} | {'swap' if 2 * back < seconds else 'recompute'}")
    return TextTable.read(
        "Swap or recompute (Llama 3 70B, FP16, 25 GB/s)",
        f"tokens | GiB | printed | one way, ms | printed | recompute on {_A100S} A100, ms | printed | cheaper",
        lines,
        [
            "Swapping goes out and back: twice the time. Recomputing: 45 % of the products' peak, and the weights",
            "are read at least once: no cheaper for short prompts. All printed sizes are 8 times too low.",
        ],
        words=(6,),
    )


def small() -> TextTable:
    """Where optimizing is said not to matter."""
    return TextTable.read(
        "Small cases",
        "case | GiB | printed",
        [
            f"Llama 3 8B, batch 32, 512 tokens | {kv_gib(MODELS['llama-3-8b'], 512, 32):.0f} | 0.5",
            f"Llama 3.2 1B, batch 64, 4096 tokens | {kv_gib(MODELS['llama-3.2-1b'], 4096, 64):.0f} | 4.3",
        ],
    )


_TABLES = (
    *(memory, batch, heads, layout, waste, blocks, beams, quantization, eviction, bandwidth, throughput),
    *(swap, small, stack, watermark, tenants),
)
TABLES: Mapping[str, Callable[..., TextTable]] = {table.__name__: table for table in _TABLES}
"""The tables by the name of their command."""
