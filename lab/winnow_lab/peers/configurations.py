"""In which configurations each peer is measured; every one holds its KVs within the same bytes, or says otherwise."""

from dataclasses import dataclass
from typing import Any

OPENVINO_BLOCK = 32
VLLM_BLOCK = 128
# Of keys and values of 64 numbers: two bytes each, or one each and a float32 scale and zero point with every 64.
U8_SAVES = 128 / 72
# A block of 32 numbers and its scale in q8_0, beside two bytes each.
Q8_0_SAVES = 64 / 34
WINNOW_POLICIES = ("leverage-pd", "kv-compress-pd", "batch-max")
"""All evict within the prompt and while decoding."""
SEEN, KEYS = "winnow-seen", "winnow-keys-pd"
PROMPTS_ALONE = "prompts alone"
"""Row of one token an answer: what no row of the work can be faster than."""
AMOUNTS = (4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Load:
    requests: int
    sequence_tokens: int
    """Prompt and answer, of the longest."""
    kv_seqs: int
    """Whole sequences for which there is KV memory."""
    float32_kvs: bool = False
    """OpenVINO holds whole KVs in float32 only, as on processors without AVX-512."""
    judged: bool = False
    """Answers are; they say nothing where weights are random."""
    later: bool = False
    """Questions come after contexts are judged."""

    def units(self, size: int, sequences: int | None = None) -> int:
        """Blocks of `size` tokens for the KVs of `sequences`, by default `kv_seqs`, in 16 bits a number."""
        return (sequences or self.kv_seqs) * -(-self.sequence_tokens // size)

    @property
    def within(self) -> str:
        """The KV memory in words."""
        return f"{self.kv_seqs} sequences"


@dataclass(frozen=True)
class Configuration:
    name: str
    kv_memory: str
    """In words, for the table."""
    options: dict[str, Any]
    """For the peer's script, which documents them; `new_tokens`: fewer tokens an answer than the work's."""
    weights: str = ""
    """Format of the converted model, where the peer has several."""


def winnow(load: Load) -> list[Configuration]:
    """Whole and evicting, each with bfloat16 and int8 KVs; narrow weights with both."""
    base = {"kv_seqs": load.kv_seqs, "dtype": "bfloat16"}
    unlimited = {"full cache, no limit": {"kv_seqs": load.requests}}
    rows = _w1_rows() | unlimited
    if load.judged:
        rows = _later_rows() if load.later else _seen_rows()
    return [
        Configuration(name, "all" if name in unlimited else load.within, base | options)
        for name, options in rows.items()
    ]


Rows = dict[str, dict[str, Any]]
_INT8_KVS, _INT8_WEIGHTS = {"kv_cache_dtype": "int8"}, {"weight_dtype": "int8"}


def _w1_rows() -> Rows:
    four: Rows = {f"{name} 4x": {"eviction": name, "compression": 4.0} for name in WINNOW_POLICIES}
    # The last policy alone stands for eviction beside narrow numbers.
    last = list(four)[-1]
    rows: Rows = {"full cache": {}, "int8 KVs": _INT8_KVS}
    rows |= four | {f"int8 KVs, {last}": _INT8_KVS | four[last]}
    rows |= {"int8 weights": _INT8_WEIGHTS, f"int8 weights, {last}": _INT8_WEIGHTS | four[last]}
    rows[f"int8 weights, int8 KVs, {last}"] = _INT8_WEIGHTS | _INT8_KVS | four[last]
    rows["q8_0 weights"] = {"weight_dtype": "q8_0"}
    return rows


def _seen_rows() -> Rows:
    """The question is in the prompt."""
    seen: Rows = {f"{SEEN} {c:.0f}x": {"eviction": SEEN, "compression": c} for c in AMOUNTS}
    rows: Rows = {"full cache": {}, "int8 KVs": _INT8_KVS, "auto": {"compression": "auto"}}
    seen |= {f"{KEYS} {c:.0f}x": {"eviction": KEYS, "compression": c} for c in AMOUNTS[1:]}
    rows |= seen | {f"int8 KVs, {name}": _INT8_KVS | options for name, options in seen.items()}
    eight = f"{SEEN} 8x"
    rows[f"int8 weights, int8 KVs, {eight}"] = _INT8_WEIGHTS | _INT8_KVS | seen[eight]
    rows[PROMPTS_ALONE] = {"new_tokens": 1}
    rows["kv-compress 8x, pool text"] = {"eviction": "kv-compress", "compression": 8.0, "pool": "text"}
    return rows


def _later_rows() -> Rows:
    """Questions come after contexts are judged."""
    rows: Rows = {"full cache": {}, "int8 KVs": _INT8_KVS}
    rows |= {f"winnow-keys {c:.0f}x": {"eviction": "winnow-keys", "compression": c} for c in (8.0, 16.0)}
    rows |= {
        f"{name}, prompts sorted": options | {"scheduling_policy": "prefix"} for name, options in rows.items()
    }
    later = "kvzip-part"
    rows |= {f"{later} {c:.0f}x": {"eviction": later, "compression": c} for c in (8.0, 16.0)}
    saved = {"eviction": "winnow-fit", "compression": 16.0, "saves_prefixes": True}
    return rows | {f"int8 KVs, {later} 8x": _INT8_KVS | rows[f"{later} 8x"], "winnow-fit 16x, saved": saved}


def openvino(load: Load) -> list[Configuration]:
    """Whole, 8-bit and evicted KVs; weights in bfloat16 arithmetic, and in 8 bits where answers are not judged."""
    blocks = load.units(OPENVINO_BLOCK)
    same_bytes = int(blocks * U8_SAVES)
    whole, blocks = ("f32", blocks // 2) if load.float32_kvs else ("bf16", blocks)
    # One block more for each sequence: the pipeline takes the next block before it needs it.
    unlimited = load.units(OPENVINO_BLOCK, load.requests) + load.requests

    def row(
        name: str,
        kv_precision: str,
        kv_blocks: int,
        eviction: int | None = None,
        step: int | None = None,
        weights: str = "fp32",
        memory: str = load.within,
    ) -> Configuration:
        options = {"precision": "bf16", "kv_precision": kv_precision, "kv_blocks": kv_blocks}
        return Configuration(name, memory, options | {"eviction": eviction, "step": step}, weights)

    def evicting(most: int, step: int | None = None, weights: str = "fp32") -> Configuration:
        name = f"u8 KVs, eviction to {most:,}" + ("" if step is None else f", steps of {step}")
        name = f"int8 weights, {name}" if weights == "int8" else name
        return row(name, "u8", same_bytes, most, step, weights)

    both = [row(f"{whole} KVs", whole, blocks), row("u8 KVs", "u8", same_bytes)]
    if load.judged:
        return [*both, evicting(512, 512), evicting(1024, 512)]
    return [
        *both,
        evicting(512),
        evicting(512, 512),
        row("int8 weights, u8 KVs", "u8", same_bytes, weights="int8"),
        evicting(512, weights="int8"),
        row(f"{whole} KVs, no limit", whole, unlimited, memory="all"),
    ]


def vllm_cpu(load: Load) -> list[Configuration]:
    """bfloat16 and fp8 KVs in the same bytes."""

    def row(name: str, kv_cache_dtype: str, sequences: int, memory: str) -> Configuration:
        tokens = load.units(VLLM_BLOCK, sequences) * VLLM_BLOCK
        return Configuration(name, memory, {"kv_cache_dtype": kv_cache_dtype, "kv_tokens": tokens})

    rows = [
        row("bf16 KVs", "auto", load.kv_seqs, load.within),
        row("fp8 KVs", "fp8", load.kv_seqs, load.within),
    ]
    return rows if load.judged else [*rows, row("bf16 KVs, no limit", "auto", load.requests, "all")]


def llama_cpp(load: Load) -> list[Configuration]:
    """f16 KVs beside weights of 16, 8.5 and about 4.8 bits; where answers are judged, q8_0 KVs in the same bytes."""
    # A slot ends an answer when its last KV is taken.
    options = {"slots": load.kv_seqs, "slot_tokens": load.sequence_tokens + 1}
    if not load.judged:
        return [
            Configuration(f"server, {label} weights", load.within, options, weights)
            for label, weights in (("bf16", "BF16"), ("Q8_0", "Q8_0"), ("Q4_K_M", "Q4_K_M"))
        ]
    slots = min(int(load.kv_seqs * Q8_0_SAVES), load.requests)
    return [
        Configuration("f16 KVs", load.within, options, "BF16"),
        Configuration("q8_0 KVs", load.within, options | {"slots": slots, "kv_type": "q8_0"}, "BF16"),
    ]
