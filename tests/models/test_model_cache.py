"""The second start takes a model from the user's cache, with the same answers; what is wrong there costs no run."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, save
from test_parity import PROMPTS
from tiny_gguf import save_gguf, tiny_llama

pytest.importorskip("winnow._native")
from winnow import LLM, SamplingParams
from winnow.cli.main import main
from winnow.config import ModelConfig
from winnow.errors import ConfigError
from winnow.models import load_model, pack_model
from winnow.models.fast.packed.description import DESCRIPTION, PACKED
from winnow.models.load.hub import DEMO_MODEL
from winnow.models.load.packed import cache
from winnow.models.model.backend_tokenizer import BACKEND, BackendTokenizer, full_tokenizer

pytestmark = pytest.mark.cpu

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
TEXT = "The quick  brown fox, 123 <|endoftext|> déjà\n\n vu \U0001f600"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where entries go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(cache.SWITCH)
    return tmp_path / "cache" / "winnow" / "models"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(ARCHITECTURES["llama-gqa"], tmp_path / "model")
    return tmp_path / "model"


def answers(path: Path, **options: Any) -> list[Any]:
    with LLM(path, kv_memory="4MiB", **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def is_cached(path: Path, **options: Any) -> bool:
    """Whether a model comes from the cache: only then is there nothing of transformers about it."""
    return type(load_model(ModelConfig(path, **options)).model).__name__ == "PackedDecoder"


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_answers_of_the_second_start_are_those_of_the_first(
    architecture: str, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    save(ARCHITECTURES[architecture], path)
    first = answers(path)
    assert len(list(folder.iterdir())) == 1
    assert is_cached(path)
    assert answers(path) == first


def test_texts_are_cut_and_joined_as_before(folder: Path) -> None:
    theirs = load_model(ModelConfig(DEMO_MODEL)).tokenizer
    [entry] = folder.iterdir()
    assert (entry / BACKEND).is_file()
    ours = load_model(ModelConfig()).tokenizer
    assert (
        isinstance(ours, BackendTokenizer) and not isinstance(theirs, BackendTokenizer) and theirs is not None
    )
    for special in (True, False):
        ids = theirs.encode(TEXT, add_special_tokens=special)
        assert ours.encode(TEXT, add_special_tokens=special) == ids
        assert ours.decode(ids, special) == theirs.decode(ids, special)
        assert ours.decode(ids, special, clean_up_tokenization_spaces=False) == theirs.decode(
            ids, special, clean_up_tokenization_spaces=False
        )
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    tokens = [*theirs.convert_ids_to_tokens(ids), "no token at all"]
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    for name in ("eos_token_id", "unk_token_id", "all_special_ids", "vocab_size", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    assert type(full_tokenizer(ours)) is type(theirs)


def test_the_second_start_keeps_answers_to_a_form(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs={"choice": ["red", "blue"]})
    for is_second in (False, True):
        with LLM(kv_memory="4MiB") as llm:
            assert isinstance(llm._tokenizer, BackendTokenizer) == is_second
            assert llm.generate(["The sky is"], params)[0].outputs[0].text in ("red", "blue")


OF_A_START = {"torch", "torchgen", "numpy", "tokenizers", "safetensors", "typing_extensions", "winnow"}
WITH_THEM = {"gguf", "yaml", "cython_runtime", "tqdm", "dill"}
"""Imported with them: by gguf YAML and tqdm, by torch dill where it is installed."""


def test_a_start_imports_nothing_heavy(command_env: dict[str, str], model: Path, tmp_path: Path) -> None:
    """Neither compilers nor symbolic algebra, nor transformers, which take longer than all else, and no server. With a
    model from the cache, with one that was packed, and with a GGUF file that is read for the first time."""
    pack_model(ModelConfig(model), tmp_path / "packed")
    file = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), "Q8_0", tokenizer="smollm")
    command = (
        "import sys; from winnow.cli.main import main; code = main(sys.argv[3:])\n"
        "code += main([*sys.argv[3:], '--model', sys.argv[2], '--no-model-cache'])\n"
        "from winnow import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], kv_memory='4MiB', eviction='batch-max', compression=2.0) as llm:\n"
        "    [answer] = llm.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))\n"
        "found = code, len(answer.outputs[0].token_ids)\n"
        "packages = {m.split('.')[0] for m in sys.modules if m[0] != '_'} - set(sys.stdlib_module_names)\n"
        f"print(sorted(packages - {OF_A_START | WITH_THEM}), *[m for m in sys.modules if m in\n"
        " ('torch._dynamo', 'winnow.server', 'winnow.openai', 'winnow.anthropic')], *found)"
    )
    arguments = [
        "generate",
        "hi",
        "--model",
        "demo",
        "--max-tokens",
        "2",
        "--kv-memory",
        "4MiB",
        "--threads",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-c", command, str(tmp_path / "packed"), str(file), *arguments],
        capture_output=True, text=True, check=True, env=command_env,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[] 0 3", done.stderr


def test_options_that_change_the_packed_form_have_entries_of_their_own(model: Path, folder: Path) -> None:
    for options in ({}, {"dtype": "bfloat16"}, {"weight_dtype": "int8"}):
        assert not is_cached(model, **options) and is_cached(model, **options), options
    assert is_cached(model, max_model_len=64), "a shorter context is served by the same entry"


def test_max_model_len_is_held_to_the_models_own(model: Path, folder: Path) -> None:
    for _ in range(2):
        assert load_model(ModelConfig(model, max_model_len=64)).max_model_len == 64
        with pytest.raises(ConfigError, match="max_model_len must be at most"):
            load_model(ModelConfig(model, max_model_len=10**6))
    assert load_model(ModelConfig(model)).max_model_len > 64


def test_another_file_is_another_model(model: Path, folder: Path) -> None:
    first = answers(model)
    save(ARCHITECTURES["llama-gqa"], model, seed=1)
    assert not is_cached(model) and is_cached(model)
    assert answers(model) != first


@pytest.mark.parametrize(
    "damage", ["cut", "changed", "no description", "no weights", "a file", "a link", "empty"]
)
def test_damaged_entries_are_replaced(damage: str, model: Path, folder: Path, tmp_path: Path) -> None:
    changed = damage == "changed"
    first = answers(model) if changed else load_model(ModelConfig(model))
    [entry] = folder.iterdir()
    weights = entry / PACKED
    if damage == "cut":
        os.truncate(weights, weights.stat().st_size // 2)
    elif changed:
        data = bytearray(weights.read_bytes())
        data[-100:] = bytes(100)
        weights.write_bytes(data)
    elif damage == "no description":
        (entry / DESCRIPTION).unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "a file":
        shutil.rmtree(entry)
        entry.write_text("of another program")
    elif damage == "a link":
        entry.rename(tmp_path / "elsewhere")
        entry.symlink_to(tmp_path / "elsewhere")
    else:
        shutil.rmtree(entry)
        entry.mkdir()
    assert not is_cached(model)
    assert is_cached(model)
    assert not changed or answers(model) == first
    assert damage != "a link" or (tmp_path / "elsewhere" / PACKED).exists()


def test_a_folder_that_takes_nothing_costs_a_warning(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answers(model, model_cache=False)
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in the place of the folder")
    with caplog.at_level(logging.WARNING):
        assert answers(model) == plain
    [record] = caplog.records
    assert record.getMessage().startswith("winnow: the model is not kept for the next start: ")
    folder.unlink()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("winnow.models.load.packed.write.save_file", full)
    assert answers(model) == plain
    assert list(folder.iterdir()) == []


def test_switched_off(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(ModelConfig(model, model_cache=False))
    monkeypatch.setenv(cache.SWITCH, "0")
    load_model(ModelConfig(model))
    assert not folder.exists()


def test_what_was_used_longest_ago_goes_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"model{index}" for index in range(3)]
    for path in paths:
        save(ARCHITECTURES["llama-gqa"], path)
    load_model(ModelConfig(paths[0]))
    [entry] = folder.iterdir()
    size = sum(file.stat().st_size for file in entry.iterdir())
    monkeypatch.setattr(cache, "MAX_BYTES", int(2.5 * size))
    load_model(ModelConfig(paths[1]))
    for age, name in enumerate(folder.iterdir()):
        os.utime(name, (1000 + age, 1000 + age))
    assert is_cached(paths[0])  # used now
    load_model(ModelConfig(paths[2]))
    assert len(list(folder.iterdir())) == 2
    assert is_cached(paths[0]) and is_cached(paths[2])


def test_named_templates_count_as_the_others(model: Path, folder: Path) -> None:
    """A changed one makes another entry, whose folder holds it."""
    named = model / "additional_chat_templates" / "tool_use.jinja"
    named.parent.mkdir()
    for text in ("first", "second"):
        named.write_text(text)
        load_model(ModelConfig(model))
        assert is_cached(model)
        assert text in {file.read_text() for file in folder.glob("*/additional_chat_templates/*.jinja")}
    assert len(list(folder.iterdir())) == 2


def test_the_commands_list_and_clear(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_model(ModelConfig(model))
    assert main(["cache", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert (
        "model (float32)" in listed[0] and listed[1].startswith(f"{folder}: ") and "of 8.0 GiB" in listed[1]
    )
    assert main(["list", str(model.parent)]) == 0
    assert str(model) in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0 and not list(folder.iterdir())
    monkeypatch.setenv(cache.SWITCH, "1KiB")
    load_model(ModelConfig(model))
    assert not list(folder.iterdir()), "it is larger than the limit"
    assert main(["pull", "smolm2"]) == 2
    assert "smollm2, gemma3 or org/name" in capsys.readouterr().err
