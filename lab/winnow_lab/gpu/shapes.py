"""Shapes of Llama with random weights, as directories that Winnow, transformers and vLLM load; imports none of them."""

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        """The configuration, as config.json has it."""
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
