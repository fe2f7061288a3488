"""Adapters merged at load answer as peft's own, over numbers and over blocks; what is more than that is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import SHAPE, save_gguf, tiny_llama
from tokenizer_kinds import byte_level
from transformers import AutoModelForCausalLM

from winnow import LLM, SamplingParams
from winnow.config import ModelConfig
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.models import load_model, load_plain_model, pack_model
from winnow.models.load.hub import locate_adapter
from winnow.process.digest import model_digest
from winnow_lab.peers.to_gguf import in_llama_cpp_order, tensor_name

peft = pytest.importorskip("peft")
gguf = pytest.importorskip("gguf")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks and scales, by the square root of the rank."""
    path = tmp_path_factory.mktemp("adapters") / "terse"
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "k_proj", "down_proj", "lm_head"],
        rank_pattern={"down_proj": 2},
        alpha_pattern={"layers.1.mlp.down_proj": 3},
    )
    model = peft.get_peft_model(tiny_llama(), config)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.3)
    model.save_pretrained(path, save_embedding_layers=False)
    return path


def expected(base: Any, adapter: Path) -> list[int]:
    merged = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    tokens = merged.generate(torch.tensor([PROMPT]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    return tokens[0, len(PROMPT) :].tolist()


def answer(model: Path, **options: Any) -> list[int]:
    with LLM(model, kv_memory="16MiB", dtype="float32", **options) as llm:
        return list(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)


def test_it_is_pefts_merged_model(base: Path, adapter: Path, tmp_path: Path, caplog: Any) -> None:
    wanted = expected(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    plain = answer(base)
    assert answer(base, lora=f"{adapter}=terse") == wanted != plain
    [said] = [each.message for each in caplog.records if "adapter" in each.message]
    assert said == "winnow: adapter terse: rank 2/4, scale 2.12132/3/4.24264, 7 layers"
    assert answer(base) == plain, "nothing of it is kept for the next start"
    pack_model(ModelConfig(base, lora=adapter, dtype="float32"), tmp_path / "packed")
    assert answer(tmp_path / "packed") == wanted
    with pytest.raises(ConfigError, match="lora must be left out for a packed model"):
        answer(tmp_path / "packed", lora=adapter)
    digests = {model_digest(base), model_digest(base, adapter)}
    config = adapter / "adapter_config.json"
    text = config.read_text()
    config.write_text(text.replace('"lora_alpha": 6', '"lora_alpha": 7'))
    assert len(digests | {model_digest(base, locate_adapter(ModelConfig(base, lora=f"{adapter}=x")))}) == 3
    config.write_text(text)


@pytest.mark.parametrize("of_gguf", [False, True])
def test_over_blocks(of_gguf: bool, adapter: Path, tmp_path: Path, caplog: Any) -> None:
    """Layers that it changes become numbers, others keep their blocks."""
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), "Q4_1")
    theirs: Any = load_plain_model(ModelConfig(path, dtype="float32")).model
    lora = as_gguf(adapter, tmp_path / "terse.gguf") if of_gguf else adapter
    wanted = expected(theirs, adapter)
    assert answer(path, lora=lora) == wanted != answer(path)
    assert any(
        each.message.endswith("7 layers; became numbers: 1 of Q8_0, 6 of Q4_1")
        or each.message.endswith("7 layers; became numbers: 6 of Q4_1, 1 of Q8_0")
        for each in caplog.records
    ), caplog.text
    if of_gguf:
        return
    decoder: Any = load_model(ModelConfig(path, lora=lora, dtype="float32")).decoder
    if decoder is not None:
        packed = [getattr(each, "packed", None) for each in decoder.modules()]
        assert "Q4_1" in {kind for each in packed for kind in getattr(each, "kinds", ())}


def as_gguf(adapter: Path, path: Path) -> Path:
    """The same factors as llama.cpp's convert_lora_to_gguf.py writes them; scales are one there, so they are in B."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 0.0)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key in [key for key in tensors if "lora_A" in key]:
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") + ".weight"
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        alpha = 3 if "layers.1.mlp" in name else 6
        ordered = in_llama_cpp_order(name, (b * alpha / len(a) ** 0.5).numpy(), SHAPE)
        theirs = tensor_name(name, SHAPE["num_hidden_layers"])
        writer.add_tensor(f"{theirs}.lora_a", a.numpy())
        writer.add_tensor(f"{theirs}.lora_b", ordered)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora = True is not served"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not served"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not served"),
        ({"peft_type": "IA3"}, "its peft_type must be LORA, got 'IA3'"),
        ("norm.weight", "norm.weight is no factor of a linear layer's weight"),
        ("model.layers.7.self_attn.q_proj.lora_{}.weight", "q_proj is no linear layer of LlamaForCausalLM"),
        (
            "model.layers.0.self_attn.v_proj.lora_{}.weight",
            r"of shape \[32, 64\], and the product of \[3, 5\]",
        ),
    ],
)
def test_what_is_refused(change: Any, words: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    if isinstance(change, dict):
        config |= change
    else:
        shapes = {"A": (2, 5), "B": (3, 2)}
        tensors |= {f"base_model.model.{change.format(each)}": torch.ones(shapes[each]) for each in shapes}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"^lora: .*{words}"):
        load_model(ModelConfig(base, lora=tmp_path))


def test_no_adapter(base: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="is neither a GGUF file nor a directory with adapter_config"
    ):
        load_model(ModelConfig(base, lora=tmp_path))
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama())
    with pytest.raises(UnsupportedModelError, match="must be adapter and lora, got"):
        load_model(ModelConfig(base, lora=path))
