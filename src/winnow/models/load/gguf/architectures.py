"""Architectures that transformers' reader of GGUF files lacks, or reads in part: rows of its tables while it reads."""

from collections.abc import Collection, Mapping
from typing import Any

_DECODER: Mapping[str, str | None] = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": None,
    "vocab_size": "vocab_size",
}
_WINDOWS = {"attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "layer_types"}
_COHERE = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
KEYS: Mapping[str, Mapping[str, str | None]] = {
    "qwen3": {**_DECODER, "attention.key_length": "head_dim"},
    "qwen2vl": _DECODER,
    "qwen3vl": {**_DECODER, "attention.key_length": "head_dim"},
    "granite": {**_DECODER, **_SCALES},
    "olmo2": _DECODER,
    "smollm3": _DECODER,
    "exaone4": {**_DECODER, **_WINDOWS},
    "glm4": {**_DECODER, "attention.key_length": "head_dim"},
    "command-r": {**_DECODER, **_COHERE},
    "cohere2": {**_DECODER, **_COHERE, **_WINDOWS},
}
"""What transformers' configurations call an architecture's keys; None: nothing, it must agree with what is computed."""
_TYPES = {"command-r": "cohere", "qwen2vl": "qwen2", "qwen3vl": "qwen3"}  # of models for text alone
TURNED = ("granite", "smollm3")
"""Those whose queries and keys llama.cpp turns as a Llama's."""
REASONS: Mapping[str, str] = {
    "deepseek2": "its latent projections lie there by head, and its positions are scaled by YaRN",
    "gemma3n": "its alternating and per-layer embeddings lie there in another layout",
    "mistral3": "its positions are scaled by YaRN, and its queries by their position",
    "qwen3next": "its linear attention lies there in another layout",
    **dict.fromkeys(
        ("granitehybrid", "granitemoe", "lfm2moe", "glm4moe", "qwen3vlmoe"),
        "its experts or states are not read",
    ),
}
"""Why others, which safetensors of the same models do not need, are not read."""


def complete_config(config: dict[str, Any], values: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Set what a configuration made by `KEYS` still lacks: what a file's other `values` and its tensors tell."""
    arch = values["general.architecture"]
    config["model_type"] = _TYPES.get(arch, arch)
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if arch == "command-r":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    elif arch == "glm4":
        config["partial_rotary_factor"] = values["glm4.rope.dimension_count"] / config["head_dim"]
    elif "attention.sliding_window" in KEYS[arch]:
        config.setdefault("sliding_window", None)
        if isinstance(slides := config.pop("layer_types", None), list):
            config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides]
