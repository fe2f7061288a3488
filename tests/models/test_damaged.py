"""Whatever is wrong with a model's directory, one line says so, at every command and with exit code 2."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, save
from safetensors.torch import load_file, save_file

from winnow.cli.main import main
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import DEMO_MODEL, load_model, load_plain_model
from winnow.models.model.damage import loading
from winnow.process.native import is_installed

Damage = Callable[[Path], None]
WEIGHTS = "model.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"


def text(name: str, content: str) -> Damage:
    """Put something else in a file's place."""

    def write(path: Path) -> None:
        (path / name).write_text(content)

    return write


def config(**values: Any) -> Damage:
    """Change config.json; None leaves a key out."""

    def change(path: Path) -> None:
        shown = json.loads((path / "config.json").read_text()) | values
        (path / "config.json").write_text(json.dumps({k: v for k, v in shown.items() if v is not None}))

    return change


def torn(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) // 2])


def no_tensor(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / WEIGHTS, {"format": "pt"})


def other_shape(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, path / WEIGHTS, {"format": "pt"})


def missing_shard(path: Path) -> None:
    names = dict.fromkeys(load_file(path / WEIGHTS), "model-00001-of-00002.safetensors")
    (path / WEIGHTS).rename(path / "model-00001-of-00002.safetensors")
    names["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (path / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def broken_index(path: Path) -> None:
    (path / WEIGHTS).rename(path / "model-00001-of-00001.safetensors")
    (path / f"{WEIGHTS}.index.json").write_text('{"weight_map": [')


def index_of_lists(path: Path) -> None:
    (path / WEIGHTS).rename(path / "model-00001-of-00001.safetensors")
    (path / f"{WEIGHTS}.index.json").write_text("[]")


def weights_are_a_directory(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).mkdir()


def other_tokenizer(path: Path) -> None:
    shutil.copy(DEMO_MODEL / "tokenizer.json", path)


DAMAGES: dict[str, Damage] = {
    "git-lfs pointer": text(WEIGHTS, LFS),
    "empty weights": text(WEIGHTS, ""),
    "torn weights": torn,
    "weights are a directory": weights_are_a_directory,
    "no weights": lambda path: (path / WEIGHTS).unlink(),
    "missing tensor": no_tensor,
    "other shape": other_shape,
    "missing shard": missing_shard,
    "broken index": broken_index,
    "index of lists": index_of_lists,
    "no config": lambda path: (path / "config.json").unlink(),
    "broken config": text("config.json", "{"),
    "empty config": text("config.json", ""),
    "config is a list": text("config.json", "[]"),
    "config is binary": lambda path: (path / "config.json").write_bytes(b"\xff\xfe\x00"),
    "config nests without end": text("config.json", "[" * 100_000),
    "no model_type": config(model_type=None),
    "model_type is a list": config(model_type=["llama"]),
    "unknown model_type": config(model_type="nonesuch"),
    "no layers": config(num_hidden_layers=0),
    "no heads": config(num_attention_heads=0),
    "no KV heads": config(num_key_value_heads=0),
    "heads that do not divide": config(num_key_value_heads=3),
    "negative size": config(hidden_size=-32),
    "no vocabulary": config(vocab_size=0),
    "size is a text": config(hidden_size="32"),
    "size is a list": config(vocab_size=[97]),
    "unknown activation": config(hidden_act="nonesuch"),
    "rope is a list": config(rope_parameters=[1]),
    "rope of an unknown kind": config(rope_parameters={"rope_type": "nonesuch", "rope_theta": 1.0}),
    "other layers than weights": config(num_hidden_layers=5),
    "broken generation_config": text("generation_config.json", "{"),
    "generation_config is a list": text("generation_config.json", "[1]"),
    "end token is a text": text("generation_config.json", '{"eos_token_id": "</s>"}'),
    "temperature that cannot be": text("generation_config.json", '{"temperature": -1, "do_sample": true}'),
    "broken tokenizer": text("tokenizer.json", "{"),
    "empty tokenizer": text("tokenizer.json", ""),
    "tokenizer is a list": text("tokenizer.json", "[]"),
    "tokenizer without a model": text("tokenizer.json", "{}"),
    "broken tokenizer_config": text("tokenizer_config.json", "{"),
    "tokenizer_config is a list": text("tokenizer_config.json", "[]"),
    "tokenizer of another model": other_tokenizer,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    save(ARCHITECTURES["llama-gqa"], path)
    return path


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(sound, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_error_names_the_directory(damage: str, model: Path) -> None:
    DAMAGES[damage](model)
    for load in (load_model, load_plain_model):
        with pytest.raises(UnsupportedModelError) as caught:
            load(ModelConfig(model))
        assert f"model: cannot load {model}: " in str(caught.value)


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        [file] = path.glob("*.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    return damage


def rounded(held: dict[str, torch.Tensor], kind: torch.dtype) -> dict[str, torch.Tensor]:
    name = "model.layers.0.mlp.up_proj.weight"
    return {name: (held[name] * 100).to(kind)}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (
            weights(lambda held: held.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})),
            "q_proj.bias",
        ),
        (
            weights(lambda held: held.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)})),
            "weight_scale",
        ),
        (
            weights(lambda held: held.update({"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(1)})),
            "lora_A",
        ),
        (config(num_hidden_layers=1), r"layers\.1\."),
        *(
            (
                weights(lambda held, kind=kind: held.update(rounded(held, kind))),
                rf"up_proj.weight holds integers \({shown}\)",
            )
            for kind, shown in ((torch.int8, "I8"), (torch.uint8, "U8"), (torch.int32, "I32"))
        ),
        (
            weights(lambda held: held.update({"model.norm.weight": torch.ones(7)})),
            r"model.norm.weight is of shape \[7\]",
        ),
        (
            text("adapter_config.json", "{}"),
            r"holds an adapter \(adapter_config.json\): give its base as the model",
        ),
        (
            config(quantization_config="gptq"),
            'config.json: quantization_config must be an object, got "gptq"',
        ),
        (config(layer_types=3), "layer_types must be a list, got 3"),
        (
            config(max_position_embeddings=-1),
            "max_position_embeddings must be a whole number above 0, got -1",
        ),
        (
            text("generation_config.json", '{"eos_token_id": "x"}'),
            "generation_config.json: eos_token_id must be",
        ),
        (text("generation_config.json", '{"eos_token_id": [2.5]}'), r"a list of them, got \[2.5\]"),
        (text("tokenizer_config.json", '{"tokenizer_class": []}'), "tokenizer_class must be a text"),
        (config(hidden_act="nonesuch"), "no hidden_act 'nonesuch'"),
        (config(pad_token_id=10**6), r"pad_token_id must be below vocab_size \(\d+\), got 1000000"),
        (config(rms_norm_eps=-1e-6), "rms_norm_eps must be a number of at least 0, got -1e-06"),
        (config(rope_parameters=None, rope_theta="x"), "rope_theta must be a number above 0, got 'x'"),
        (
            config(rope_parameters={"rope_type": "linear", "factor": -2.0, "rope_theta": 1e4}),
            "factor must be a number above 0, got -2.0",
        ),
    ],
)
def test_what_a_model_leaves_out_is_named(damage: Callable[[Path], None], named: str, model: Path) -> None:
    damage(model)
    for load in (load_model, load_plain_model):
        with pytest.raises(UnsupportedModelError, match=named):
            load(ModelConfig(model))


def test_weights_without_numbers_are_named(model: Path) -> None:
    """Kernels that pass NaN over would answer in silence."""
    name = "model.layers.0.self_attn.q_proj.weight"
    weights(lambda held: held[name].fill_(torch.nan))(model)
    with pytest.raises(
        UnsupportedModelError, match="own code gives no logits that are finite: weights are NaN"
    ):
        load_model(ModelConfig(model))


def test_tensors_that_change_nothing_may_stay(model: Path) -> None:
    weights(
        lambda held: held.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                "model.layers.0.self_attn.q_proj.bias": torch.zeros(32),
                "model.layers.0.self_attn.k_proj.k_scale": torch.ones(1),
                "mtp.layers.0.weight": torch.ones(2),
            }
        )
    )(model)
    load_plain_model(ModelConfig(model))


@pytest.mark.parametrize("damage", ["git-lfs pointer", "broken config", "broken tokenizer", "missing shard"])
def test_every_command_says_it_in_one_line(
    damage: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[damage](model)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [5]}\n')
    commands = [
        ["generate", "x"],
        ["inspect", "x", "-o", str(tmp_path / "page.html")],
        ["run", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "out.jsonl")],
    ]
    if is_installed():  # else packing is refused before the model is looked at
        commands.append(["pack", str(tmp_path / "packed")])
    for command in commands:
        assert main([*command, "--model", str(model)]) == 2
        assert capsys.readouterr().err.startswith("winnow: error: model: cannot load ")
    assert main(["check", str(model)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"winnow: error: model: cannot load {model}: ")


@pytest.fixture
def public_model(model: Path) -> Iterator[Path]:
    """A copy that any user reads; root, which reads everything, is another user meanwhile."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(shutil.copytree(model, Path(directory) / "model"))
        for path in (copy.parent, copy, *copy.iterdir()):
            path.chmod(0o755)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield copy
        finally:
            os.seteuid(user)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_files_that_may_not_be_read(name: str, public_model: Path) -> None:
    load_model(ModelConfig(public_model))
    user = os.geteuid()
    os.seteuid(os.getuid())  # who owns the files
    (public_model / name).chmod(0)
    os.seteuid(user)
    with pytest.raises(UnsupportedModelError, match="model: cannot load"):
        load_model(ModelConfig(public_model))


def test_numbers_that_json_lacks_are_read(model: Path) -> None:
    """As transformers 5 writes them."""
    infinite = {"__float__": "Infinity"}
    config(time_step_limit=[0.0, infinite], rms_norm_eps=1e-6)(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "limit": infinite}))
    loaded = load_model(ModelConfig(model))
    assert loaded.eos_token_ids == {3} and loaded.vocab_size == VOCAB
    assert loaded.model.config.time_step_limit == [0.0, float("inf")]


def test_a_model_too_large_for_its_gpu_says_what_was_asked_and_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * 2**30, 80 * 2**30))
    with pytest.raises(UnsupportedModelError) as refused, loading(tmp_path):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 4.50 GiB. GPU 0 has a total capacity"
        )
    said = str(refused.value)
    assert "asked for 4.50 GiB more, and 3.0 GiB of 80.0 GiB are free" in said and "cannot load" not in said
