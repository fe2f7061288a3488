"""Classes with attention of their own, or in an order of their own: the cache computes what their code does."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import VOCAB, generate_alone, save
from transformers import (
    BigBirdConfig,
    BloomConfig,
    DiffLlamaConfig,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoXJapaneseConfig,
    HrmTextConfig,
    MptConfig,
    PretrainedConfig,
    RoFormerConfig,
    XGLMConfig,
)

from winnow import LLM, SamplingParams
from winnow.attention import AttentionSpec
from winnow.attention.native import KernelStep
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import load_model

_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_COMMON = _TOKENS | {
    "tie_word_embeddings": False,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
_FALCON = _COMMON | {"ffn_hidden_size": 48}
CONFIGS: dict[str, PretrainedConfig] = {
    "bloom": BloomConfig(**_TOKENS, hidden_size=32, n_layer=3, n_head=4, tie_word_embeddings=False),
    "falcon with slopes": FalconConfig(**_FALCON, alibi=True, new_decoder_architecture=False),
    "falcon with groups": FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "mpt": MptConfig(
        vocab_size=VOCAB, d_model=32, n_layers=3, n_heads=4, max_seq_len=256, tie_word_embeddings=False
    ),
    "gpt_neo": GPTNeoConfig(
        **_TOKENS,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=9,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    ),
    # Two whose modules attend several times in a pass.
    "diffllama": DiffLlamaConfig(**_COMMON, num_key_value_heads=2),
    "hrm_text": HrmTextConfig(
        **_COMMON | {"num_hidden_layers": 6},
        num_key_value_heads=2,
        num_layers_per_stack=1,
        H_cycles=2,
        L_cycles=2,
    ),
    "gpt_neox_japanese": GPTNeoXJapaneseConfig(**_COMMON, intermediate_multiple_size=2),
    "roformer": RoFormerConfig(**_COMMON, is_decoder=True, rotary_value=True),
    "xglm": XGLMConfig(
        **_TOKENS, d_model=32, num_layers=3, attention_heads=4, ffn_dim=48, max_position_embeddings=256
    ),
    "big_bird": BigBirdConfig(**_COMMON, is_decoder=True, attention_type="original_full"),
}
PROMPTS = [random.Random(n).choices(range(3, VOCAB), k=n) for n in (1, 16, 23, 100)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def answers(path: Path, **options: Any) -> list[list[int]]:
    with LLM(path, kv_memory="8MiB", max_model_len=200, max_num_seqs=3, **options) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        llm.check_integrity()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_its_own(name: str, tmp_path: Path) -> None:
    model = save(CONFIGS[name], tmp_path)
    if isinstance(model, FalconForCausalLM):
        model.config._attn_implementation = "sdpa"  # its eager attention adds slopes twice
    expected = [generate_alone(model, tokens, GREEDY.max_tokens) for tokens in PROMPTS]
    for options in ({}, {"prefill_chunk": 16, "optimize": False}):
        assert answers(tmp_path, **options) == expected, options


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("bloom", {"slopes": None}),
        ("falcon with slopes", {"slopes": None}),
        ("mpt", {"slopes": None}),
        ("gpt_neo", {"window": None}),
        ("gpt_neo", {"scale": 32**-0.5}),
    ],
)
def test_what_is_left_out_is_noticed(
    name: str, without: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CONFIGS[name], tmp_path)
    attend = KernelStep.attend

    def changed(self: KernelStep, layer: int, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        return attend(self, layer, q, replace(spec, **without))

    monkeypatch.setattr(KernelStep, "attend", changed)
    with pytest.raises(UnsupportedModelError, match="Winnow computes something else than its own code"):
        load_model(ModelConfig(tmp_path, max_model_len=200))


def test_slopes_are_those_of_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon divides the bias by the root of the head's size as it does products."""
    seen = []
    attend = KernelStep.attend

    def noted(self: KernelStep, layer: int, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        seen.append(spec.slopes)
        return attend(self, layer, q, spec)

    monkeypatch.setattr(KernelStep, "attend", noted)
    for name, factor in (("bloom", 1.0), ("falcon with slopes", 8**-0.5)):
        seen.clear()
        save(CONFIGS[name], tmp_path / name)
        load_model(ModelConfig(tmp_path / name, max_model_len=200))
        slopes = factor * 0.25 ** torch.arange(1, 5)
        assert seen and all(torch.allclose(each, slopes) for each in seen)
