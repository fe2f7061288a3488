"""Architectures in GGUF files: greedy tokens of transformers' own model in float32, or one refusal by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from winnow import LLM
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import load_model

pytest.importorskip("gguf")
from gguf_architectures import ARCHITECTURES, GREEDY, PROMPT, answer, compare, save, tiny, winnow_answer
from tiny_gguf import in_parts


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_answers_as_the_model_that_was_written(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Alone, and behind a prefix that is shared; a policy evicts, and a line says in what the model computes."""
    caplog.set_level("INFO", "winnow.models")
    model = tiny(name)
    path = save(tmp_path / "tiny.gguf", name, model)
    longer = [*PROMPT, 30, 31, 32]
    with LLM(path, kv_memory="16MiB", block_size=4, model_cache=False) as llm:
        first, second = (llm.generate([tokens], GREEDY)[0] for tokens in (PROMPT, longer))
        assert first.outputs[0].token_ids == answer(model)
        assert second.outputs[0].token_ids == answer(model, longer) and second.num_cached_tokens >= 16
        evicted = llm.generate([longer], replace(GREEDY, eviction="h2o", kv_budget=12))[0].outputs[0]
        llm.check_integrity()
    report = evicted.eviction
    assert report is not None and report.rounds > 0 and report.bytes_freed > 0
    assert report.mean_kept <= 12 + 12 < report.num_tokens and len(evicted.token_ids) == 12
    [said] = [line for line in caplog.messages if "weight_dtype" in line]
    assert said == "tiny.gguf: dtype float32, weight_dtype auto"


@pytest.mark.parametrize(
    ("name", "kind"), [("granite", "Q8_0"), ("glm4", "IQ4_XS"), ("command-r", "Q4_K"), ("olmo2", "IQ3_S")]
)
def test_kinds_of_blocks(name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Answers are those of the file's numbers; layers keep its bits, or a line says which become wider."""
    caplog.set_level("INFO", "winnow.models")
    kept = kind != "IQ3_S"
    path = tmp_path / "tiny.gguf"
    assert compare(path, name, kind) == ("equal, own bits" if kept else "equal, widened")
    load_model(ModelConfig(path, model_cache=False))
    said = "weight_dtype its own blocks" if kept else "weight_dtype auto; widened are its IQ3_S, Q8_0"
    assert caplog.messages[-1].endswith(said)


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
