"""Architectures in GGUF files: greedy tokens of transformers' own model in float32, or one refusal by name."""

from pathlib import Path

import pytest

from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import load_model, load_plain_model

pytest.importorskip("gguf", reason="the extra gguf is not installed")
from gguf_architectures import ARCHITECTURES, answer, save, tiny, winnow_answer
from tiny_gguf import in_parts


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_answers_as_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    path = save(tmp_path / "tiny.gguf", name, model)
    assert winnow_answer(path) == answer(model)


@pytest.mark.parametrize("name", ["granite", "olmo2", "glm4", "command-r"])
def test_blocks_of_tables_of_ours(name: str, tmp_path: Path) -> None:
    """Weights keep the file's blocks: answers are those of their numbers."""
    path = save(tmp_path / "tiny.gguf", name, tiny(name), "Q8_0")
    loaded = load_model(ModelConfig(path, dtype="float32", model_cache=False))
    assert loaded.blocks is not None and loaded.blocks.kind is None
    theirs = load_plain_model(ModelConfig(path, dtype="float32")).model
    assert winnow_answer(path, dtype="float32") == answer(theirs)


def test_others_are_refused_by_name(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    for name in ("deepseek2", "gemma3n", "mistral3", "qwen3next", "lfm2moe", "rwkv7"):
        writer = GGUFWriter(tmp_path / "tiny.gguf", name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UnsupportedModelError, match=f"{name}"):
            load_model(ModelConfig(tmp_path / "tiny.gguf"))


def test_parts_that_transformers_reads_itself(tmp_path: Path) -> None:
    """Files of several parts are one, but of architectures whose files transformers opens by their path."""
    model = tiny("gpt-oss")
    second = in_parts(save(tmp_path / "oss.gguf", "gpt-oss", model), 3)[1]
    assert winnow_answer(second) == answer(model)
    second = in_parts(save(tmp_path / "lfm2.gguf", "lfm2", tiny("lfm2")), 3)[1]
    with pytest.raises(UnsupportedModelError, match="reads lfm2 from whole files alone: join its 3 parts"):
        winnow_answer(second)
