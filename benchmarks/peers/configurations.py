"""In which configurations each peer is measured; every one holds its KVs within the same bytes, or says otherwise."""

from dataclasses import dataclass
from typing import Any

from winnow.options import EngineOptions

OPENVINO_BLOCK = 32
TRANSFORMERS_PAGE = 128
VLLM_BLOCK = 128
# Of keys and values of 64 numbers: two bytes each, or one each and a float32 scale and zero point with every 64.
U8_SAVES = 128 / 72
WINNOW_POLICIES = ("leverage-pd", "kv-compress-pd", "batch-max")
"""All evict within the prompt and while decoding."""


@dataclass(frozen=True)
class Load:
    """What configurations depend on."""

    requests: int
    sequence_tokens: int
    """Prompt and answer, of the longest."""
    kv_seqs: int
    """Whole sequences for which there is KV memory."""
    float32_kvs: bool = False
    """OpenVINO holds whole KVs in float32 only, as on processors without AVX-512."""
    policies: tuple[str, ...] = WINNOW_POLICIES
    """Of Winnow, at 4x."""
    eviction_tokens: int = 512
    """What OpenVINO's eviction holds a sequence to."""

    def units(self, size: int, sequences: int | None = None) -> int:
        """Blocks of `size` tokens for the KVs of `sequences`, by default `kv_seqs`, in 16 bits a number."""
        return (sequences or self.kv_seqs) * -(-self.sequence_tokens // size)

    @property
    def within(self) -> str:
        """The KV memory in words."""
        return f"{self.kv_seqs} sequences"


@dataclass(frozen=True)
class Configuration:
    """One row of the table."""

    name: str
    kv_memory: str
    """In words, for the table."""
    options: dict[str, Any]
    """For the peer's script, which documents them."""
    weights: str = ""
    """Format of the converted model, where the peer has several."""
    lacking: str | None = None
    """Why it is not run here."""


def winnow(load: Load) -> list[Configuration]:
    """Whole and evicting, each with bfloat16 and int8 KVs; narrow weights with both."""
    base = {"kv_seqs": load.kv_seqs, "dtype": "bfloat16"}
    int8_kvs, int8_weights = {"kv_cache_dtype": "int8"}, {"weight_dtype": "int8"}
    known = "weight_dtype" in EngineOptions.__annotations__
    unknown = None if known else "this version of Winnow has no option weight_dtype"
    four = {f"{name} 4x": {"eviction": name, "compression": 4.0} for name in load.policies}
    # The last policy alone stands for eviction beside narrow numbers.
    last = list(four)[-1]
    rows = {"full cache": {}, "int8 KVs": int8_kvs}
    rows |= four | {f"int8 KVs, {last}": int8_kvs | four[last]}
    weights = {"int8 weights": int8_weights, f"int8 weights, {last}": int8_weights | four[last]}
    weights[f"int8 weights, int8 KVs, {last}"] = int8_weights | int8_kvs | four[last]
    weights["q8_0 weights"] = {"weight_dtype": "q8_0"}
    return [
        *(Configuration(name, load.within, base | options) for name, options in rows.items()),
        *(
            Configuration(name, load.within, base | options, lacking=unknown)
            for name, options in weights.items()
        ),
        Configuration("full cache, no limit", "all", base | {"kv_seqs": load.requests}),
    ]


def openvino(load: Load) -> list[Configuration]:
    """Whole, 8-bit and evicted KVs; weights in bfloat16 arithmetic, and in 8 bits."""

    def options(
        kv_precision: str, kv_blocks: int, eviction: int | None = None, step: int | None = None
    ) -> dict[str, Any]:
        return {
            "precision": "bf16",
            "kv_precision": kv_precision,
            "kv_blocks": kv_blocks,
            "eviction": eviction,
            "step": step,
        }

    blocks = load.units(OPENVINO_BLOCK)
    same_bytes = int(blocks * U8_SAVES)
    whole, blocks = ("f32", blocks // 2) if load.float32_kvs else ("bf16", blocks)
    # One block more for each sequence: the pipeline takes the next block before it needs it.
    unlimited = load.units(OPENVINO_BLOCK, load.requests) + load.requests
    most = load.eviction_tokens
    evicting = f"u8 KVs, eviction to {most}"
    return [
        Configuration(f"{whole} KVs", load.within, options(whole, blocks), "fp32"),
        Configuration("u8 KVs", load.within, options("u8", same_bytes), "fp32"),
        Configuration(evicting, load.within, options("u8", same_bytes, most), "fp32"),
        Configuration(f"{evicting}, steps of 512", load.within, options("u8", same_bytes, most, 512), "fp32"),
        Configuration("int8 weights, u8 KVs", load.within, options("u8", same_bytes), "int8"),
        Configuration(f"int8 weights, {evicting}", load.within, options("u8", same_bytes, most), "int8"),
        Configuration(f"{whole} KVs, no limit", "all", options(whole, unlimited), "fp32"),
    ]


def vllm_cpu(load: Load) -> list[Configuration]:
    """bfloat16 and fp8 KVs in the same bytes."""
    tokens = load.units(VLLM_BLOCK) * VLLM_BLOCK
    unlimited = load.units(VLLM_BLOCK, load.requests) * VLLM_BLOCK
    return [
        Configuration("bf16 KVs", load.within, {"kv_cache_dtype": "auto", "kv_tokens": tokens}),
        Configuration("fp8 KVs", load.within, {"kv_cache_dtype": "fp8", "kv_tokens": tokens}),
        Configuration("bf16 KVs, no limit", "all", {"kv_cache_dtype": "auto", "kv_tokens": unlimited}),
    ]


def transformers(load: Load) -> list[Configuration]:
    """Static and continuous batches."""
    pages = load.units(TRANSFORMERS_PAGE)
    paged = {"dtype": "bfloat16", "page_size": TRANSFORMERS_PAGE, "kv_pages": pages}
    return [
        Configuration("generate", load.within, {"dtype": "bfloat16", "batch": load.kv_seqs}),
        Configuration("generate_batch", load.within, paged),
    ]


def ctranslate2(load: Load) -> list[Configuration]:
    """Static batches."""
    return [
        Configuration("int8 weights", load.within, {"compute_type": "int8", "batch": load.kv_seqs}),
    ]


def llama_cpp(load: Load) -> list[Configuration]:
    """f16 KVs beside weights of 16, 8.5 and about 4.8 bits."""
    # A slot ends an answer when its last KV is taken.
    options = {"slots": load.kv_seqs, "slot_tokens": load.sequence_tokens + 1}
    return [
        Configuration(f"server, {label} weights", load.within, options, weights)
        for label, weights in (("bf16", "BF16"), ("Q8_0", "Q8_0"), ("Q4_K_M", "Q4_K_M"))
    ]
