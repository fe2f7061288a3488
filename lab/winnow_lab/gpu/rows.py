"""Shapes of Llama with random weights, and rows of a report: nothing here imports Winnow, transformers or vLLM."""

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = Mapping[str, Any]
READ, PRODUCT = "read", "product, 16 bits"
"""Names of the limits that other rows are held beside."""


def put(name: str, value: float, unit: str, **more: Any) -> None:
    """Print a row. `bytes` or `flops` of it say what the device has to read or compute at least."""
    print(json.dumps({"name": name, "value": value, "unit": unit, **more}), flush=True)


def milliseconds(call: Callable[[], object], device: str) -> float:
    """The median of a call's durations: of a CUDA graph of it, where one can be captured."""
    if device == "cpu":
        call()
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    from triton.testing import do_bench, do_bench_cudagraph

    try:
        return float(do_bench_cudagraph(call, rep=30, return_mode="median"))
    except RuntimeError:
        torch.cuda.synchronize()
        return float(do_bench(call, warmup=10, rep=60, return_mode="median"))


def page(head: Mapping[str, Any], parts: Mapping[str, Sequence[Row]], notes: Mapping[str, str]) -> str:
    """One page: a table of each part, beside the limits where they apply; `notes` say what was cut off."""
    limits = {row["name"]: row["value"] for row in parts.get("limits", ())}
    lines = [", ".join(f"{name} {value}" for name, value in head.items())]
    for part, rows in parts.items():
        lines += ["", f"{part}{f' ({notes[part]})' if part in notes else ''}"]
        width = max((len(row["name"]) for row in rows), default=0)
        lines += [
            f"  {row['name']:{width}} {_number(row['value']):>9} {row['unit']}{_beside(row, limits)}"
            for row in rows
        ]
    return "\n".join(lines)


def _beside(row: Row, limits: Mapping[str, float]) -> str:
    read, product = limits.get(READ), limits.get(PRODUCT)
    least = [1e3 * row["bytes"] / (read * 1e12)] if "bytes" in row and read else []
    least += [1e3 * row["flops"] / (product * 1e12)] if "flops" in row and product else []
    if not least or row["unit"] != "ms":
        return ""
    return f"   limit {_number(max(least))}, {100 * max(least) / row['value']:.0f} %"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def read_rows(lines: Iterable[str]) -> list[Row]:
    """The rows among what a part printed; libraries print too."""
    found: list[Row] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"name", "value", "unit"} <= set(row):
            found.append(row)
    return found


VOCAB = 128256
MODELS: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "toy": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
}
MODELS["1b"] |= {"tie_word_embeddings": True}
MODELS["toy"] |= {"vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Work:
    """A model's shape and the requests that it answers: `sequences` of `prompt` + `new` tokens."""

    model: str
    sequences: int = 64
    prompt: int = 2048
    new: int = 256
    fitting: int = 16
    """Sequences that the scarce KV memory holds."""

    @property
    def values(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 65536,
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **MODELS[self.model],
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of 16-bit weights that a step reads: layers and head."""
        v = self.values
        heads = v["num_attention_heads"] + v["num_key_value_heads"]
        layer = 2 * heads * v["head_dim"] * v["hidden_size"] + 3 * v["hidden_size"] * v["intermediate_size"]
        return int(2 * (v["num_hidden_layers"] * layer + v["hidden_size"] * v["vocab_size"]))

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's KVs, of 16 bits a number."""
        v = self.values
        return int(v["num_hidden_layers"] * v["num_key_value_heads"] * v["head_dim"] * 2 * 2)

    def directory(self) -> Path:
        """A new directory with nothing but the configuration."""
        path = Path(tempfile.mkdtemp(prefix=f"winnow-gpu-{self.model}-"))
        (path / "config.json").write_text(json.dumps(self.values), encoding="utf-8")
        return path

    def prompts(self) -> list[list[int]]:
        """Random tokens, the same in every process."""
        draw = random.Random(0)
        vocab = self.values["vocab_size"]
        return [[draw.randrange(3, vocab) for _ in range(self.prompt)] for _ in range(self.sequences)]


def work(model: str, device: str) -> Work:
    """The work of a model's shape; on a CPU one that only shows that all of it runs."""
    return Work("toy", sequences=4, prompt=64, new=12, fitting=2) if device == "cpu" else Work(model)
