"""Models of other kinds are refused by name, with what is missing, and never sent to an engine that refuses too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import _COMMON, save
from transformers import (
    BartConfig,
    BertConfig,
    CLIPConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    MambaConfig,
    OpenAIGPTConfig,
    PhiConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    T5Config,
    WhisperConfig,
)

from winnow import LLM
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import load_model, load_plain_model

_GROUPED: dict[str, Any] = _COMMON | {"num_key_value_heads": 2}
_STATE = "has layers that keep a state in place of keys and values by token"
_MIXED = ["linear_attention", "full_attention", "linear_attention"]

KINDS: dict[str, tuple[PretrainedConfig, str]] = {
    "bart": (BartConfig(vocab_size=50, d_model=16), "bart is not supported: it is an encoder-decoder"),
    "bart's decoder": (
        BartConfig(vocab_size=50, d_model=16, is_encoder_decoder=False, is_decoder=True),
        "bart is not supported: it is an encoder-decoder",
    ),
    "t5": (T5Config(vocab_size=50, d_model=16), "t5 is not supported: it is an encoder-decoder"),
    "whisper": (WhisperConfig(vocab_size=50), "whisper is not supported: it is an encoder-decoder"),
    "bert": (BertConfig(vocab_size=50, hidden_size=24), "BertLMHeadModel is not supported: it is an encoder"),
    "clip": (CLIPConfig(), "clip is not supported: it is a model of several parts"),
    "mamba": (MambaConfig(vocab_size=50), f"MambaForCausalLM is not supported: it {_STATE}"),
}
# Served by engine=paged alone; see test_recurrent.py.
WITH_STATES: dict[str, tuple[PretrainedConfig, str]] = {
    "qwen3.5": (
        Qwen3_5TextConfig(**_GROUPED, head_dim=16, layer_types=_MIXED),
        f"Qwen3_5ForCausalLM is not supported: it {_STATE} .linear_attention.",
    ),
    "qwen3-next": (
        Qwen3NextConfig(**_GROUPED, head_dim=16, layer_types=_MIXED),
        f"Qwen3NextForCausalLM is not supported: it {_STATE} .linear_attention.",
    ),
    "lfm2": (
        Lfm2Config(**_GROUPED, layer_types=["conv", "full_attention", "conv"]),
        f"Lfm2ForCausalLM is not supported: it {_STATE} .conv.",
    ),
    "falcon-h1": (FalconH1Config(**_GROUPED), f"FalconH1ForCausalLM is not supported: it {_STATE}"),
    "granite-4": (
        GraniteMoeHybridConfig(
            **_GROUPED, layer_types=["mamba", "attention", "mamba"], mamba_n_heads=4, mamba_d_head=16
        ),
        f"GraniteMoeHybridForCausalLM is not supported: it {_STATE}",
    ),
}


@pytest.mark.parametrize("kind", WITH_STATES)
def test_states_are_refused_by_engines_of_padded_batches(kind: str, tmp_path: Path) -> None:
    config, message = WITH_STATES[kind]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"model: {message}"):
        load_plain_model(ModelConfig(tmp_path, load_format="dummy"))


@pytest.mark.parametrize("kind", KINDS)
def test_refused(kind: str, tmp_path: Path) -> None:
    config, message = KINDS[kind]
    config.save_pretrained(tmp_path)
    for load in (load_model, load_plain_model):
        with pytest.raises(UnsupportedModelError, match=f"model: {message}") as caught:
            load(ModelConfig(tmp_path, load_format="dummy"))
        assert "engine" not in str(caught.value)


def test_a_class_without_a_cache_is_refused(tmp_path: Path) -> None:
    OpenAIGPTConfig(vocab_size=50, n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="is not supported"):
        LLM(tmp_path, load_format="dummy", max_model_len=64, kv_memory="4MiB")


@pytest.mark.parametrize("window", [24, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_that_masks_alone_are_told_of(window: int, dtype: str, tmp_path: Path) -> None:
    """Also one that is longer than any prompt that load could afford."""
    save(PhimoeConfig(**_GROUPED, sliding_window=window, num_local_experts=4), tmp_path)
    with pytest.raises(
        UnsupportedModelError,
        match=rf"PhimoeForCausalLM is not supported: layer 0 .* sees {window} keys, not 512",
    ):
        load_model(ModelConfig(tmp_path, dtype=dtype))


def test_without_that_window_it_is_served(tmp_path: Path) -> None:
    save(PhimoeConfig(**_GROUPED, sliding_window=None, num_local_experts=4), tmp_path)
    verified = load_model(ModelConfig(tmp_path)).verified
    assert verified is not None and verified.difference < 1e-4 and verified.past == 510
    assert load_model(ModelConfig(tmp_path, verify_model=False)).verified is None


def test_a_token_that_a_bias_rules_out_is_compared_too(tmp_path: Path) -> None:
    model = save(PhiConfig(**_COMMON), tmp_path)
    with torch.no_grad():
        model.lm_head.bias[91] = float("-inf")
    model.save_pretrained(tmp_path)
    verified = load_model(ModelConfig(tmp_path)).verified
    assert verified is not None and verified.num_tokens == 12 and verified.difference < 1e-4
