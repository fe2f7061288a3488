"""GGUF files that are read without transformers: what comes of them is what comes by its code, to the last bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import SHAPE, save_gguf
from tokenizer_kinds import CORPUS, byte_level
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from winnow.config import ModelConfig
from winnow.models.fast.fused.build import trial_logits
from winnow.models.fast.packed.decoder import PackedDecoder
from winnow.models.load.loader import load_model

pytest.importorskip("winnow._native")

KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def save(path: Path, architecture: str, *, tied: bool, rule: str, **more: Any) -> Path:
    config, kind = KINDS[architecture]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # transformers reads no other size of Qwen 3's heads.
        size = 128 if architecture == "qwen3" else SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
        shape = SHAPE | {"vocab_size": len(byte_level()), "head_dim": size, "tie_word_embeddings": tied}
        model = kind(config(**shape)).eval()
        for name, weight in model.named_parameters():
            weight.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    values = {f"{architecture}.attention.{name}_length": size for name in ("key", "value")} | more.pop(
        "values", {}
    )
    return save_gguf(path, model, "Q8_0", architecture=architecture, tokenizer=rule, values=values, **more)


@pytest.mark.parametrize(
    ("architecture", "tied", "rule", "last", "dtype"),
    [
        ("llama", False, "smollm", (("<a>", 3), ("<b>", 4)), "bfloat16"),
        ("llama", True, "llama-bpe", (), "float32"),
        ("qwen2", True, "qwen2", (("<|im_end|>", 3),), "float32"),
        ("qwen3", False, "gpt-2", (), "bfloat16"),
    ],
)
def test_as_by_transformers(
    architecture: str, tied: bool, rule: str, last: Any, dtype: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "tiny.gguf", architecture, tied=tied, rule=rule, last=last)
    config = ModelConfig(path, dtype=dtype, model_cache=False)
    ours, theirs = load_model(config), load_model(config, own_code=True)
    assert (
        isinstance(ours.model, PackedDecoder) and theirs.verified is not None and theirs.decoder is not None
    )
    tokens = ours.trained_len, ours.vocab_size
    assert torch.equal(trial_logits(ours.model, *tokens), trial_logits(theirs.decoder, *tokens))
    for name in ("geometry", "max_model_len", "vocab_size", "eos_token_ids", "sampling_defaults", "blocks"):
        assert getattr(ours, name) == getattr(theirs, name), name
    mine, full = ours.tokenizer, theirs.tokenizer
    assert mine is not None and full is not None
    backends = [json.loads(each.backend_tokenizer.to_str()) for each in (mine, full)]
    assert backends[0] == backends[1]
    assert [mine.all_special_ids, mine.unk_token_id] == [full.all_special_ids, full.unk_token_id]
    texts = [*CORPUS, "In 2024, 12345 <a>s and <b>s.\n\n  It's"]
    assert [mine.encode(text) for text in texts] == [full.encode(text) for text in texts]


@pytest.mark.parametrize(
    "values", [{"llama.attention.sliding_window": 64}, {"llama.rope.scaling.factor": 2.0}]
)
def test_a_key_more_is_left_to_transformers(values: dict[str, Any], tmp_path: Path) -> None:
    """Which applies it, or refuses it by name."""
    path = save(tmp_path / "tiny.gguf", "llama", tied=True, rule="smollm", values=values)
    try:
        loaded = load_model(ModelConfig(path, dtype="float32", model_cache=False))
    except ValueError as error:
        assert next(iter(values)).rpartition(".")[2] in str(error)
    else:
        assert loaded.verified is not None
