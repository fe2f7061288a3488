"""Who is measured: how each peer is installed, how it gets the model, and in which configurations it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPENVINO_BLOCK = 32
TRANSFORMERS_PAGE = 128
# Of keys and values of 64 numbers: two bytes each, or one each and a float32 scale and zero point with every 64.
U8_SAVES = 128 / 72


@dataclass(frozen=True)
class Load:
    """What configurations depend on."""

    requests: int
    sequence_tokens: int
    """Prompt and answer."""
    kv_seqs: int
    """Whole sequences for which there is KV memory."""
    float32_kvs: bool = False
    """OpenVINO holds whole KVs in float32 only, as on processors without AVX-512."""

    def units(self, size: int, sequences: int | None = None) -> int:
        """Blocks of `size` tokens for the KVs of `sequences`, by default `kv_seqs`, in 16 bits a number."""
        return (sequences or self.kv_seqs) * -(-self.sequence_tokens // size)


@dataclass(frozen=True)
class Configuration:
    """One row of the table."""

    name: str
    kv_memory: str
    """In words, for the table."""
    options: dict[str, Any]
    """For the peer's script, which documents them."""


@dataclass(frozen=True)
class Peer:
    """An engine to compare with."""

    name: str
    script: str
    configurations: Callable[[Load], list[Configuration]]
    packages: tuple[str, ...] = ()
    """pip installs them beside torch, in an environment of the peer's own; none: Winnow's own environment is used."""
    unwanted: tuple[str, ...] = ()
    """What they bring and the work does not need, to be taken out again."""
    convert: Callable[[Path, Path], Sequence[str | Path]] | None = None
    """From the model's directory to the converted one: the command, whose first word lies in the environment's bin."""


def _within(load: Load) -> str:
    return f"{load.kv_seqs} sequences"


def _winnow(load: Load) -> list[Configuration]:
    base = {"kv_seqs": load.kv_seqs, "dtype": "bfloat16"}
    # All evict within the prompt and while decoding.
    policies = ("leverage-pd", "kv-compress-pd", "batch-max")
    compressed = [
        Configuration(f"{name} 4x", _within(load), base | {"eviction": name, "compression": 4.0})
        for name in policies
    ]
    return [
        Configuration("full cache", _within(load), base),
        *compressed,
        Configuration("full cache, no limit", "all", base | {"kv_seqs": load.requests}),
    ]


def _openvino(load: Load) -> list[Configuration]:
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
    return [
        Configuration(f"{whole} KVs", _within(load), options(whole, blocks)),
        Configuration("u8 KVs", _within(load), options("u8", same_bytes)),
        Configuration("u8 KVs, eviction to 512", _within(load), options("u8", same_bytes, 512)),
        Configuration(
            "u8 KVs, eviction to 512, steps of 512", _within(load), options("u8", same_bytes, 512, 512)
        ),
        Configuration(f"{whole} KVs, no limit", "all", options(whole, unlimited)),
    ]


def _export_openvino(model: Path, out: Path) -> Sequence[str | Path]:
    task = ("--task", "text-generation-with-past", "--weight-format", "fp32")
    return ["optimum-cli", "export", "openvino", "--model", model, *task, out]


def _transformers(load: Load) -> list[Configuration]:
    pages = load.units(TRANSFORMERS_PAGE)
    paged = {"dtype": "bfloat16", "page_size": TRANSFORMERS_PAGE, "kv_pages": pages}
    return [
        Configuration("generate", _within(load), {"dtype": "bfloat16", "batch": load.kv_seqs}),
        Configuration("generate_batch", _within(load), paged),
    ]


def _ctranslate2(load: Load) -> list[Configuration]:
    return [
        Configuration("int8 weights", _within(load), {"compute_type": "int8", "batch": load.kv_seqs}),
    ]


def _convert_ctranslate2(model: Path, out: Path) -> Sequence[str | Path]:
    return ["ct2-transformers-converter", "--model", model, "--output_dir", out]


def _llama_cpp(load: Load) -> list[Configuration]:
    # A slot ends an answer when its last KV is taken.
    options = {"slots": load.kv_seqs, "slot_tokens": load.sequence_tokens + 1}
    return [Configuration("server, bf16 weights", _within(load), options)]


def _convert_llama_cpp(model: Path, out: Path) -> Sequence[str | Path]:
    return ["python", Path(__file__).parent / "to_gguf.py", model, out]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("winnow", "winnow_peer.py", _winnow),
        Peer(
            "openvino",
            "openvino_peer.py",
            _openvino,
            ("openvino-genai", "optimum-intel[openvino]"),
            # Built for torch with CUDA: it cannot be imported beside another one.
            ("torchvision",),
            _export_openvino,
        ),
        Peer("transformers", "transformers_peer.py", _transformers, ("transformers", "accelerate", "psutil")),
        Peer(
            "ctranslate2",
            "ctranslate2_peer.py",
            _ctranslate2,
            ("ctranslate2", "transformers", "sentencepiece"),
            convert=_convert_ctranslate2,
        ),
        Peer(
            "llama.cpp",
            "llama_cpp_peer.py",
            _llama_cpp,
            ("gguf", "safetensors"),
            convert=_convert_llama_cpp,
        ),
    )
}
