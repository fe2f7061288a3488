"""Tiny random models of every architecture that is promised, saved as a user's directory would be."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 97
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,  # tied embeddings make a tiny model echo its input
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

ARCHITECTURES: dict[str, PretrainedConfig] = {
    "llama-gqa": LlamaConfig(**_COMMON, num_key_value_heads=2),
    "llama-mqa": LlamaConfig(**_COMMON, num_key_value_heads=1),
    "llama-mha": LlamaConfig(**_COMMON, num_key_value_heads=4),
    "mistral-window": MistralConfig(**_COMMON, num_key_value_heads=2, sliding_window=24),
    "qwen2": Qwen2Config(**_COMMON, num_key_value_heads=2),
    "qwen3": Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=16),
    "phi3": Phi3Config(**_COMMON, num_key_value_heads=2),
    # The default soft-cap of 50 is never reached by a tiny random model.
    "gemma2": Gemma2Config(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": Gemma3TextConfig(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    # One sink logit per query head.
    "gpt-oss": GptOssConfig(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    # Learned absolute positions. Its default end token lies outside this vocabulary.
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=512, tie_word_embeddings=False
    ),
}


def build(config: PretrainedConfig, seed: int = 0) -> torch.nn.Module:
    """A float32 model whose every weight matters: fresh norm weights are all 1 and would hide errors."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight.add_(0.3 * torch.randn_like(weight))
                else:
                    # larger than a trained model's: attention must be peaked for an error to change a token
                    weight.normal_(0.0, 0.25 if "embed" not in name else 1.0)
    return model.eval()


def save(config: PretrainedConfig, path: Path, seed: int = 0) -> torch.nn.Module:
    model = build(config, seed)
    model.save_pretrained(path)
    return model


def generate_alone(model: torch.nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own greedy answer to one prompt, end of text ignored."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=2,
    )
    return output[0, len(prompt) :].tolist()
