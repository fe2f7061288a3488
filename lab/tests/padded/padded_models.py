"""Tiny random models that the padded engine must serve, and what transformers answers to each query alone."""

import random
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
from architectures import ARCHITECTURES, VOCAB, build, generate_alone
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Llama4TextConfig,
    MptConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from winnow.config import EngineConfig
from winnow.models import PlainModel
from winnow_lab.padded.build import PaddedEngine, padded_engine
from winnow_lab.padded.options import PaddedOptions

MAX_MODEL_LEN = 160
MAX_TOKENS = 16
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}

# By name: the configuration, and which of transformers' attention implementations runs it.
MODELS: dict[str, tuple[PretrainedConfig, str]] = {
    "llama-gqa": (ARCHITECTURES["llama-gqa"], "sdpa"),
    "qwen3": (ARCHITECTURES["qwen3"], "sdpa"),
    # sliding windows, in every layer or in some; soft-caps; sinks
    "mistral-window": (ARCHITECTURES["mistral-window"], "sdpa"),
    "gemma2": (ARCHITECTURES["gemma2"], "eager"),
    "gpt-oss": (ARCHITECTURES["gpt-oss"], "eager"),
    # learned absolute positions, told by position_ids
    "gpt2": (ARCHITECTURES["gpt2"], "sdpa"),
    "opt": (
        OPTConfig(
            **_COMMON,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            word_embed_proj_dim=32,
        ),
        "eager",
    ),
    # ALiBi from the attention mask, and from columns
    "bloom": (BloomConfig(**_COMMON, n_layer=2, n_head=4), "eager"),
    "falcon-alibi": (
        FalconConfig(
            **_COMMON,
            num_hidden_layers=2,
            num_attention_heads=4,
            alibi=True,
            multi_query=False,
            new_decoder_architecture=False,
        ),
        "sdpa",
    ),
    "mpt": (
        MptConfig(
            d_model=32,
            n_heads=4,
            n_layers=2,
            max_seq_len=MAX_MODEL_LEN,
            vocab_size=VOCAB,
            tie_word_embeddings=False,
        ),
        "eager",
    ),
    # attention in chunks of the text; keys and values of different size
    "llama4-chunks": (
        Llama4TextConfig(
            **_COMMON,
            intermediate_size=48,
            intermediate_size_mlp=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            attention_chunk_size=24,
            num_local_experts=2,
            max_position_embeddings=512,
        ),
        "eager",
    ),
    "deepseek-v3": (
        DeepseekV3Config(
            **_COMMON,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            first_k_dense_replace=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            max_position_embeddings=512,
        ),
        "eager",
    ),
}


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return random.Random(1000 * seed + length).choices(range(3, VOCAB), k=length)


# Lengths on both sides of windows and chunks.
PROMPTS = [prompt(length) for length in (1, 2, 5, 11, 23, 24, 31, 47, 70)]


@dataclass(frozen=True)
class Case:
    """A model, and its own greedy answers."""

    model: PreTrainedModel = field(repr=False)

    @cached_property
    def answers(self) -> list[list[int]]:
        """`MAX_TOKENS` tokens for each of `PROMPTS`, computed alone."""
        return [generate_alone(self.model, tokens, MAX_TOKENS) for tokens in PROMPTS]

    def open(self, mode: str, **options: object) -> PaddedEngine:
        """A padded engine around the model, without files; its clock counts calls."""
        given = {name: value for name, value in options.items() if value is not None}
        own = {each.name: given.pop(each.name) for each in fields(PaddedOptions) if each.name in given}
        texts = [
            f"{name}={('off', 'on')[value] if isinstance(value, bool) else value}"
            for name, value in own.items()
        ]
        config = EngineConfig.from_options(
            {"engine": f"padded:{','.join([f'mode={mode}', *texts])}", **given}
        )
        ticks = iter(range(10**9))
        plain = PlainModel(self.model, None, VOCAB, MAX_MODEL_LEN, frozenset())
        return padded_engine(plain, config, lambda: float(next(ticks)))


def case(name: str) -> Case:
    """One of `MODELS`."""
    config, attention = MODELS[name]
    model = build(config)
    model.set_attn_implementation(attention)
    assert isinstance(model, PreTrainedModel) and model.dtype == torch.float32
    return Case(model)
