"""The longest sequence that a configuration makes room for."""

from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from winnow.models.model.context import context_limit

_LONG = {"short_factor": [1.0] * 2, "long_factor": [4.0] * 2}


def llama(**rope: Any) -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=16, num_attention_heads=4, max_position_embeddings=512, rope_parameters=_rope(**rope)
    )


def _rope(**rope: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, **rope}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (llama(rope_type="default"), 512),
        (llama(rope_type="linear", factor=4.0), 2048),
        (llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=512), 2048),
        (llama(rope_type="yarn", factor=4.0), 2048),
        # max_position_embeddings is the product already, as in gpt-oss and DeepSeek
        (llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=128), 512),
        # Qwen 3: the original is less than max_position_embeddings
        (llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=256), 1024),
        (llama(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0), 512),
        (llama(rope_type="dynamic", factor=4.0), 512),
        (llama(rope_type="longrope", original_max_position_embeddings=128, **_LONG), 128),
        (LlamaConfig(max_position_embeddings=512, rope_scaling={"type": "linear", "factor": 2.0}), 1024),
        (Qwen2Config(max_position_embeddings=512, rope_scaling={"type": "yarn", "factor": 2.5}), 1280),
        # Gemma 3: only layers without a window are stretched, and max_position_embeddings counts that
        (
            Gemma3TextConfig(
                max_position_embeddings=512,
                rope_parameters={
                    "full_attention": _rope(rope_type="linear", factor=8.0),
                    "sliding_attention": _rope(rope_type="default"),
                },
            ),
            512,
        ),
        (
            Gemma3TextConfig(
                max_position_embeddings=512,
                rope_parameters={
                    "full_attention": _rope(rope_type="linear", factor=8.0),
                    "sliding_attention": _rope(rope_type="linear", factor=2.0),
                },
            ),
            1024,
        ),
    ],
)
def test_longest_sequence(config: PretrainedConfig, tokens: int) -> None:
    assert context_limit(config).tokens == tokens


def test_the_reason_names_the_factor() -> None:
    assert "yarn RoPE's factor" in context_limit(llama(rope_type="yarn", factor=4.0)).reason
