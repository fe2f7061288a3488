"""Experts as grouped products: what transformers' loop over them gives, alone and in batches."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import _COMMON, VOCAB, build, generate_alone, save
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from winnow import LLM, SamplingParams
from winnow.config import ModelConfig
from winnow.models import load_model
from winnow.models.fast.packed_linear import linear_maker
from winnow.models.model.blocks import BlockWeights
from winnow.models.model.experts import GroupedExperts, is_experts
from winnow.process.native import native_kernels

_MOE = _COMMON | {"num_hidden_layers": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt-oss": GptOssConfig(
        **_MOE,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "qwen3": Qwen3MoeConfig(
        **_MOE,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=3,
    ),
    "mixtral": MixtralConfig(**_MOE, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**_MOE, num_key_value_heads=2, num_experts=8, num_experts_per_tok=3),
    "deepseek": DeepseekV3Config(
        **_MOE,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def own_experts(name: str) -> Any:
    model = build(CONFIGS[name])
    model.set_experts_implementation("eager")  # type: ignore[operator]
    return next(module for module in model.modules() if is_experts(module))


def maker(blocks: BlockWeights | None = None) -> Any:
    kernels = native_kernels()
    if kernels is None:
        pytest.skip("needs the kernels: make setup")
    from winnow.models.fast.fused.kernels import LayerKernels

    return linear_maker(LayerKernels(kernels), torch.float32, blocks=blocks)


def routed(tokens: int, chosen: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 32, generator=generator)
    experts = torch.stack([torch.randperm(8, generator=generator)[:chosen] for _ in range(tokens)])
    experts[experts == 5] = 2  # an expert that no token goes to, and one that some choose twice
    return x, experts, torch.rand(tokens, chosen, generator=generator)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("name", CONFIGS)
def test_they_give_what_the_loop_gives(name: str, tokens: int) -> None:
    own = own_experts(name)
    grouped = GroupedExperts(own, maker())
    with torch.inference_mode():
        x, experts, weights = routed(tokens)
        torch.testing.assert_close(grouped(x, experts, weights), own(x, experts, weights))
        found = GroupedExperts(own, maker(BlockWeights(kind="Q8_0")))(x, experts, weights)
    error = (found - own(x, experts, weights)).norm() / found.norm()
    assert 1e-5 < error < 0.05


def test_a_token_does_not_depend_on_those_beside_it() -> None:
    grouped = GroupedExperts(own_experts("qwen3"), maker())
    with torch.inference_mode():
        x, experts, weights = routed(33)
        alone = [grouped(x[i : i + 1], experts[i : i + 1], weights[i : i + 1]) for i in range(33)]
        assert torch.equal(torch.cat(alone), grouped(x, experts, weights))


@pytest.mark.parametrize("name", CONFIGS)
def test_models_answer_as_before(name: str, tmp_path: Path) -> None:
    model = save(CONFIGS[name], tmp_path)
    prompts = [random.Random(n).choices(range(3, VOCAB), k=n) for n in (1, 23, 47, 70)]
    expected = [generate_alone(model, tokens, 12) for tokens in prompts]
    with LLM(tmp_path, kv_memory="4MiB", prefill_chunk=32, max_model_len=200) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == expected


def test_their_weights_are_packed_and_let_go(tmp_path: Path) -> None:
    save(CONFIGS["qwen3"], tmp_path)
    for weight_dtype in ("auto", "int8"):
        model = load_model(ModelConfig(tmp_path, max_model_len=200, weight_dtype=weight_dtype)).model
        grouped = [module for module in model.modules() if isinstance(module, GroupedExperts)]
        assert len(grouped) == 2
        assert not [name for name, _ in model.named_parameters() if "experts" in name]
        assert all(up.in_blocks == (weight_dtype == "int8") for each in grouped for up in each.up)
