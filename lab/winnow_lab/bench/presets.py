"""Fixed work, also with a name: a model of random weights, its requests and KV memory, so that engines are compared."""

import hashlib
import json
import os
import random
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from winnow.config import EngineConfig
from winnow.errors import ConfigError
from winnow.values.checks import check_counts, require

# What the engine keeps for each KV while nothing is evicted.
_NUM_ACCUMULATORS = 1


@dataclass(frozen=True)
class Workload:
    """Requests that differ only in the tokens of their prompts, all there from the start."""

    requests: int = 32
    prompt_tokens: int = 512
    new_tokens: int = 64
    prompt_seed: int = 0

    def __post_init__(self) -> None:
        check_counts(self, zero=("prompt_seed",))

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens

    @property
    def output_tokens(self) -> int:
        return self.requests * self.new_tokens

    @property
    def total_tokens(self) -> int:
        return self.requests * self.sequence_tokens

    def having(self, **numbers: int | None) -> Self:
        """The work with `numbers` in place of its own, but for those that are None; raises ConfigError out of range."""
        return replace(self, **{name: value for name, value in numbers.items() if value is not None})

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids, the same for every engine that is given the same work."""
        generator = random.Random(self.prompt_seed)
        return [
            [generator.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.requests)
        ]


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

    def save(self, directory: Path) -> Path:
        """Write config.json and bfloat16 safetensors to a directory below `directory`, unless they are there."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()
        path = directory / f"llama-{digest[:8]}"
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
    shape: LlamaShape
    workload: Workload
    dtype: str
    kv_seqs: int


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
    )
}
"""w1: 107 million parameters, 32 long prompts, KV memory for a quarter of them."""


def model_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "winnow" / "bench"


def kv_memory_for(config: EngineConfig, sequences: int, num_kvs: int) -> int:
    """The least `kv_memory` in which `sequences` sequences of `num_kvs` KVs a row lie side by side, none evicted.

    It is the same for every eviction policy, so that all can be compared within the same bytes. The model is loaded
    to be asked for its shape. Raises ConfigError where the sequences are too many or too long.
    """
    from winnow.cache import CacheSize
    from winnow.models import load_model

    limit = config.scheduler.max_num_seqs
    require(1 <= sequences <= limit, "kv_seqs", f"between 1 and max_num_seqs ({limit})", sequences)
    model = load_model(config.model)
    if num_kvs > model.max_model_len:
        raise ConfigError(
            f"prompt_tokens + new_tokens must be at most the model's {model.max_model_len}, got {num_kvs}"
        )
    layout = model.kv_layout(config.cache, _NUM_ACCUMULATORS)
    blocks = sequences * layout.blocks_for(num_kvs)
    return CacheSize.of_blocks(layout, blocks, limit, model.max_model_len).nbytes(layout)
