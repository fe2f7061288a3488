"""What a model's generation_config.json recommends serves requests that do not say."""

import json
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, save

from winnow import LLM, SamplingParams
from winnow.cli.main import main
from winnow.errors import UnsupportedModelError
from winnow.models.load.directory import sampling_defaults


def tell(path: Path, **values: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("shown", "taken"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": 5}, {"top_k": 5}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
        ),
        ({"repetition_penalty": 1.05, "max_new_tokens": 99}, {"repetition_penalty": 1.05, "max_tokens": 99}),
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7},
            {"temperature": 0.0, "max_tokens": 7},
        ),
        ({"num_beams": 4, "max_length": 20, "eos_token_id": [1]}, {}),
    ],
)
def test_what_is_taken(shown: dict[str, Any], taken: dict[str, Any], tmp_path: Path) -> None:
    tell(tmp_path, **shown)
    assert sampling_defaults(tmp_path, "auto") == taken
    assert sampling_defaults(tmp_path, "winnow") == {}
    assert sampling_defaults(tmp_path / "elsewhere", str(tmp_path)) == taken


def test_a_named_directory_must_hold_one(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, "auto") == {}
    with pytest.raises(UnsupportedModelError, match=r"generation_config must be auto, winnow or a directory"):
        sampling_defaults(tmp_path, str(tmp_path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(ARCHITECTURES["llama-gqa"], path)
    return tell(path, do_sample=True, temperature=0.0, max_new_tokens=3, eos_token_id=[])


def test_llm(model: Path, engine_name: str) -> None:
    with LLM(model, kv_memory="4MiB", engine=engine_name) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
        assert len(llm.generate([5, 6])[0].outputs[0].token_ids) == 3
        assert len(list(llm.stream([5, 6]))[-1].outputs[0].token_ids) == 3
        # Parameters that are given are taken as they are.
        given = SamplingParams(ignore_eos=True)
        assert len(llm.generate([5, 6], given)[0].outputs[0].token_ids) == 16
    with LLM(model, kv_memory="4MiB", engine=engine_name, generation_config="winnow") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_run(model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": [5, 6]}, {"prompt": [5, 6], "max_tokens": 5, "ignore_eos": True}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def lengths(*typed: str) -> list[int]:
        command = ["run", str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "o.jsonl"), "--overwrite"]
        assert main([*command, "--model", str(model), "--kv-memory", "4MiB", "--ignore-eos", *typed]) == 0
        records = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
        return [len(record["token_ids"]) for record in records]

    assert lengths() == [3, 5]
    assert lengths("--max-tokens", "4") == [4, 5]
    assert lengths("--generation-config", "winnow") == [16, 5]


def test_the_demo_model_recommends_nothing() -> None:
    with LLM(kv_memory="16MiB") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_a_packed_model_keeps_them(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("winnow._native")
    assert main(["pack", str(tmp_path / "packed"), "--model", str(model)]) == 0
    with LLM(tmp_path / "packed", kv_memory="4MiB") as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
