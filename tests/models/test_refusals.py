"""What cannot be served is refused by name, with the reason."""

import json
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, save
from transformers import CpmAntConfig, LlamaConfig, OpenAIGPTConfig, PretrainedConfig, T5Config

from winnow.config import ModelConfig
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.models import load_model


def directory(path: Path, config: object) -> Path:
    config.save_pretrained(path)  # type: ignore[attr-defined]
    return path


def dummy(path: Path, **options: object) -> ModelConfig:
    return ModelConfig(model=path, load_format="dummy", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        (CpmAntConfig(num_hidden_layers=1, vocab_size=50), "adds to logits what is no multiple of distance"),
        (OpenAIGPTConfig(n_layer=1, vocab_size=50), "and it keeps no cache"),
    ],
)
def test_own_attention_that_is_not_captured(config: PretrainedConfig, hint: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=hint):
        load_model(dummy(directory(tmp_path, config), max_model_len=64))


def test_not_a_causal_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="t5 is not supported: it is an encoder-decoder"):
        load_model(dummy(directory(tmp_path, T5Config(d_model=16, num_layers=1, num_heads=2, vocab_size=50))))


def test_unknown_layer_kind(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
    config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        load_model(dummy(directory(tmp_path, config)))


def test_rope_that_depends_on_the_batch_serves_up_to_where_it_does_not(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 128,
    }
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
        max_position_embeddings=512,
        rope_parameters=rope,
    )
    path = directory(tmp_path, config)
    assert load_model(dummy(path)).max_model_len == 128
    with pytest.raises(ConfigError, match="max_model_len must be at most 128, up to which its longrope RoPE"):
        load_model(dummy(path, max_model_len=200))


def test_context_beyond_the_model(tmp_path: Path) -> None:
    path = directory(tmp_path, ARCHITECTURES["llama-gqa"])
    with pytest.raises(ConfigError, match=r"max_model_len must be at most 512, .* got 513"):
        load_model(dummy(path, max_model_len=513))


def test_a_model_without_a_context_length_needs_one(tmp_path: Path) -> None:
    path = directory(tmp_path, ARCHITECTURES["llama-gqa"])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 0}))
    with pytest.raises(ConfigError, match="max_model_len must be given: LlamaConfig names no"):
        load_model(dummy(path))
    assert load_model(dummy(path, max_model_len=100)).max_model_len == 100


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no such directory or file: .*nowhere"):
        load_model(ModelConfig(model=tmp_path / "nowhere"))


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"holds no config\.json"):
        load_model(ModelConfig(model=tmp_path))


def test_unreadable_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"cannot read .*config\.json"):
        load_model(ModelConfig(model=tmp_path))


def test_unknown_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(UnsupportedModelError, match="knows no model_type 'nonesuch'"):
        load_model(ModelConfig(model=tmp_path))


def test_weights_that_could_carry_code_are_not_read(tmp_path: Path) -> None:
    path = directory(tmp_path, ARCHITECTURES["llama-gqa"])
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(
        UnsupportedModelError, match=r"holds no \*\.safetensors; other weight formats can carry code"
    ):
        load_model(ModelConfig(model=path))


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    save(ARCHITECTURES["llama-gqa"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(
        UnsupportedModelError, match=r"lacks \d+ of LlamaForCausalLM's weights, such as model\.layers\.3"
    ):
        load_model(ModelConfig(model=tmp_path))


def test_code_in_the_directory_is_never_run(tmp_path: Path) -> None:
    save(ARCHITECTURES["llama-gqa"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    assert type(load_model(ModelConfig(model=tmp_path)).model).__name__ == "LlamaForCausalLM"


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    path = directory(tmp_path, ARCHITECTURES["llama-gqa"])
    weights = [load_model(dummy(path, seed=seed)).model.get_input_embeddings().weight for seed in (1, 1, 2)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])
