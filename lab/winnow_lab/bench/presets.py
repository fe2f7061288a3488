"""Work with a name: a model of random weights, its requests and its KV memory, so that engines can be compared."""

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from winnow_lab.bench.workload import Workload


@dataclass(frozen=True)
class LlamaShape:
    """A Llama whose weights are drawn at random: speed depends on the shape alone."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = True
    seed: int = 0

    @property
    def fingerprint(self) -> str:
        """Identifier of weights of this shape."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]

    def save(self, directory: Path) -> Path:
        """Write config.json and bfloat16 safetensors to a directory below `directory`, unless they are there."""
        path = directory / f"llama-{self.fingerprint}"
        if not path.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            # Under another name until it is whole: an interrupted start leaves no half of a model behind.
            with tempfile.TemporaryDirectory(dir=directory) as unfinished:
                self._write(Path(unfinished) / "model")
                (Path(unfinished) / "model").rename(path)
        return path

    def _write(self, path: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config: dict[str, Any] = asdict(self)
        seed = config.pop("seed")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(LlamaConfig(**config))
        model.to(torch.bfloat16).save_pretrained(path)


@dataclass(frozen=True)
class Preset:
    """A model, its work, and KV memory for a number of whole sequences."""

    shape: LlamaShape
    workload: Workload
    dtype: str
    kv_seqs: int

    def workload_with(self, **numbers: int | None) -> Workload:
        """Return its work with `numbers` in place of its own, but for those that are None.

        Raises:
            ConfigError: a number is out of range.
        """
        return replace(self.workload, **{name: value for name, value in numbers.items() if value is not None})


PRESETS = {
    "w1": Preset(
        LlamaShape(
            num_hidden_layers=12,
            hidden_size=768,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            intermediate_size=2304,
            vocab_size=32000,
            max_position_embeddings=4096,
        ),
        Workload(requests=32, prompt_tokens=1024, new_tokens=128),
        dtype="bfloat16",
        kv_seqs=8,
    ),
}
"""w1: 107 million parameters, 32 long prompts, KV memory for a quarter of them."""


def model_cache() -> Path:
    """Return where models of presets are kept from one start to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "winnow" / "bench"
