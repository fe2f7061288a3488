"""Models of latents: one key for all heads, which is its value too, and answers of transformers' own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from architectures import generate_alone, save
from hybrids import HYBRIDS
from torch import Tensor
from transformers import (
    AXK2Config,
    DeepseekV2Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    MiniCPM3Config,
    PretrainedConfig,
)

from winnow import LLM, SamplingParams
from winnow.config import CacheConfig, ModelConfig
from winnow.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from winnow.models import load_model
from winnow.models.bind.binding import LatentHeads
from winnow.models.model.kv_layout import configured_layout
from winnow_lab.plan.models import find_model

DEEPSEEK = HYBRIDS["deepseek-v3"]
OWN = {
    n: v
    for n, v in DEEPSEEK.to_dict().items()
    if n not in ("model_type", "architectures", "transformers_version")
}
MODELS: dict[str, PretrainedConfig] = {
    "deepseek-v2": DeepseekV2Config(**OWN | {"topk_method": "greedy"}),
    "glm-4.7-flash": Glm4MoeLiteConfig(**OWN),
    "minicpm3": MiniCPM3Config(**OWN),
}
CHOSEN = 80
# They attend to all keys up to as many tokens as their index chooses, which no prompt's answer passes.
INDEXED = {"index_topk": CHOSEN, "index_n_heads": 2, "index_head_dim": 16}
SPARSE: dict[str, PretrainedConfig] = {
    kind.model_type: kind(**{n: v for n, v in OWN.items() if n != "layer_types"} | INDEXED)
    for kind in (DeepseekV32Config, GlmMoeDsaConfig, AXK2Config)
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [list(range(3, 3 + length)) for length in (1, 17, 50, 70)]
LAYERS, KEY = 4, 16 + 8


@pytest.mark.parametrize("name", [*MODELS, *SPARSE])
def test_answers_are_transformers_own(name: str, tmp_path: Path) -> None:
    model = save((MODELS | SPARSE)[name], tmp_path)
    with LLM(tmp_path, kv_memory="4MiB", max_num_seqs=3, prefill_chunk=16) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        llm.check_integrity()
    assert found == [generate_alone(model, tokens, 8) for tokens in PROMPTS]


def test_sparse_attention_is_dense_up_to_what_it_chooses(tmp_path: Path) -> None:
    model = save(SPARSE["deepseek_v32"], tmp_path)
    with LLM(tmp_path, kv_memory="4MiB") as llm:
        tokens = PROMPTS[-1][:1] * (CHOSEN - 8)
        [output] = llm.generate([tokens], GREEDY)
        assert output.outputs[0].token_ids == generate_alone(model, tokens, 8)
        with pytest.raises(InvalidRequestError, match=f"{CHOSEN}"):
            llm.generate([[5] * (CHOSEN + 1)], GREEDY)
        refused = (
            r"eviction must be none for a model whose sparse attention chooses 80 KVs among all, got h2o"
        )
        with pytest.raises(InvalidRequestError, match=refused):
            llm.generate([tokens], replace(GREEDY, eviction="h2o", kv_budget=40))
    with pytest.raises(ConfigError, match=refused):
        LLM(tmp_path, eviction="h2o", kv_budget=40)
    with pytest.raises(ConfigError, match=f"max_model_len must be at most {CHOSEN}, up to which its sparse"):
        LLM(tmp_path, max_model_len=CHOSEN + 1)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek")
    save(DEEPSEEK, path)
    return path


def test_a_token_takes_its_latent_and_one_rotated_key(deepseek: Path) -> None:
    loaded = load_model(ModelConfig(deepseek, dtype="float32", device="cpu"))
    layout = loaded.kv_layout(CacheConfig(kv_cache_dtype="bfloat16"), 1)
    assert layout.rows_per_seq == LAYERS and layout.kinds[0].slot_bytes == 2 * KEY
    assert layout.kinds[0].form.nbytes == 16 * 2 * KEY
    shape = find_model(deepseek)
    assert shape.latent and shape.kv_elements() == LAYERS * KEY
    published = configured_layout(
        CacheConfig(), num_layers=61, num_kv_heads=1, head_dim=512 + 64, dtype="bfloat16", latent=True
    )
    assert published.rows_per_seq * published.kinds[0].slot_bytes == 2 * 576 * 61


@pytest.mark.parametrize("form", ["int8", "fp8_e4m3", "int4"])
def test_codecs_that_store_keys_and_values_alike(deepseek: Path, form: str) -> None:
    with LLM(deepseek, kv_cache_dtype=form, kv_memory="4MiB", kv_floor=1) as llm:
        evicted = replace(GREEDY, eviction="h2o", kv_budget=40)
        outputs = llm.generate([PROMPTS[-1]] * 2, [GREEDY, evicted])
        llm.check_integrity()
        assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "k=int8,v=int4"}, "kv_cache_dtype must store keys and values alike for latents"),
        ({"kv_bias": True}, "kv_bias"),
        ({"value_tier": "host:L=1,N=16"}, "value_tier does not go with latents"),
    ],
)
def test_what_values_of_their_own_would_need(deepseek: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(deepseek, kv_memory="4MiB", **options)


@pytest.mark.parametrize("side", ["absorb", "expand"])
def test_a_wrong_expansion_is_noticed(deepseek: Path, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = getattr(LatentHeads, side)

    def wrong(self: LatentHeads, x: Tensor) -> Tensor:
        found: Tensor = own(self, x)
        return found.roll(1, dims=1)  # each head gets what another one should

    monkeypatch.setattr(LatentHeads, side, wrong)
    with pytest.raises(UnsupportedModelError, match="Winnow computes something else than its own code"):
        load_model(ModelConfig(deepseek))
