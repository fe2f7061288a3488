"""GGUF files of the Hub by name, fetched from a server that speaks its API, and read in parts."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_hub import COMMIT, REPOSITORY, LocalHub, serving

from winnow import LLM, SamplingParams
from winnow.cli.main import main
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models.load import hub as places
from winnow.models.load.hub import locate_model
from winnow.process.digest import model_digest
from winnow.process.progress import listening

pytest.importorskip("gguf")
from tiny_gguf import in_parts, save_gguf, tiny_llama

PARTS = [f"big/tiny-Q8_0-{n:05}-of-00003.gguf" for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    """tiny-F32.gguf, tiny-Q4_1.gguf, and tiny-Q8_0 in three parts."""
    folder = tmp_path_factory.mktemp("files")
    files = {
        name: save_gguf(folder / name, tiny_llama(), kind)
        for kind in ("F32", "Q4_1")
        if (name := f"tiny-{kind}.gguf")
    }
    whole = save_gguf(folder / "tiny-Q8_0.gguf", tiny_llama(), "Q8_0")
    files |= dict(zip(PARTS, in_parts(whole, 3), strict=True))
    files |= {"mmproj-tiny-Q4_1.gguf": files["tiny-F32.gguf"], "README.md": folder / "README.md"}
    files["README.md"].write_text("tiny")
    with serving(LocalHub(files), tmp_path_factory.mktemp("cache")) as started:
        yield started


@pytest.fixture
def offline(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def answer(model: Any) -> list[int]:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = LLM(model, kv_memory="16MiB", dtype="float32", model_cache=False)
    return list(llm.generate([[5, 6, 7, 8, 9]], greedy)[0].outputs[0].token_ids)


def located(model: str) -> Path:
    return locate_model(ModelConfig(model))


def test_a_file_by_its_kind_its_name_or_none(hub: LocalHub) -> None:
    hub.broken.add("tiny-Q4_1.gguf")
    found = located(f"{REPOSITORY}:q4_1")
    # The cache is huggingface_hub's own, and an interrupted download resumes.
    assert found.parts[-3:] == ("snapshots", COMMIT, "tiny-Q4_1.gguf") and hub.ranges == ["tiny-Q4_1.gguf"]
    assert found.read_bytes() == hub.files["tiny-Q4_1.gguf"].read_bytes()
    assert "Bearer hf_ours" in hub.tokens
    fetched = list(hub.fetched)
    assert located(f"{REPOSITORY}:tiny-Q4_1.gguf") == found and hub.fetched == fetched
    # Without a kind Q4_K_M, or the first, which is in three parts here; mmproj is no model.
    assert located(REPOSITORY) == found.with_name("big") / Path(PARTS[0]).name
    assert set(hub.fetched) == {"tiny-Q4_1.gguf", *PARTS}


def test_bytes_are_reported_as_they_come(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    heard: list[tuple[Any, ...]] = []
    with listening(lambda *each: heard.append(each)):
        located(f"{REPOSITORY}:F32")
    size = hub.files["tiny-F32.gguf"].stat().st_size
    assert heard[-1] == ("fetching", size, size, "B")


def test_parts_are_one_model_by_the_name_of_any(hub: LocalHub, tmp_path: Path) -> None:
    expected = answer(save_gguf(tmp_path / "whole.gguf", tiny_llama(), "Q8_0"))
    assert answer(f"{REPOSITORY}:{PARTS[1]}") == expected
    third = hub.files[PARTS[2]]
    first = locate_model(ModelConfig(third))
    assert first == third.with_name(hub.files[PARTS[0]].name) and answer(third) == expected
    # All parts make the model what it is.
    for each in third.parent.glob("*-of-00003.gguf"):
        shutil.copy(each, tmp_path / each.name)
    here = locate_model(ModelConfig(tmp_path / third.name))
    digest = model_digest(here)
    (tmp_path / third.name).write_bytes(third.read_bytes()[:-4] + b"1234")
    assert model_digest(here) != digest
    shutil.copy(tmp_path / hub.files[PARTS[1]].name, tmp_path / third.name)
    with pytest.raises(UnsupportedModelError, match=r"-00003-of-00003.gguf is part 2 of 3 by what it says"):
        answer(here)
    (tmp_path / third.name).unlink()
    with pytest.raises(
        UnsupportedModelError, match=r"it is of 3 parts, and .*-00003-of-00003.gguf is missing"
    ):
        answer(here)


def test_commands(hub: LocalHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    located(f"{REPOSITORY}:q4_1")
    monkeypatch.setattr("winnow.cli.list._ROOM", 2**60)
    assert main(["list", REPOSITORY]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {f"{REPOSITORY}:{name}" for name in ("tiny-F32.gguf", "tiny-Q4_1.gguf", PARTS[0])}
    size = sum(hub.files[part].stat().st_size for part in PARTS)
    assert f"{size / 2**10:.1f} KiB" in lines[f"{REPOSITORY}:{PARTS[0]}"]
    assert all("exceeds" in line for line in lines.values())
    assert (
        lines[f"{REPOSITORY}:tiny-Q4_1.gguf"].endswith("is here")
        and "here" not in lines[f"{REPOSITORY}:tiny-F32.gguf"]
    )
    assert main(["pull", f"{REPOSITORY}:Q4_1"]) == 0
    assert capsys.readouterr().out.strip().endswith("tiny-Q4_1.gguf")
    typed = ["generate", "hi", "--max-tokens", "2", "--kv-memory", "4MiB", "--no-model-cache"]
    assert main([*typed, "-hf", REPOSITORY, "--hf-file", "tiny-Q4_1.gguf"]) == 0, capsys.readouterr().err
    assert main([*typed, "-hf", "models", "--hf-file", "tiny-Q4_1.gguf"]) == 2
    assert "--hf-file needs a model of the Hub" in capsys.readouterr().err


def test_what_is_not_there(hub: LocalHub) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r":Q4_K_M: .* none has this name or kind; there are: big/tiny-Q8"
    ):
        located(f"{REPOSITORY}:Q4_K_M")
    with pytest.raises(UnsupportedModelError, match=r"cannot load some/other: .*no such repository"):
        located("some/other:Q4_1")
    assert places.is_repository("a/b:Q8_0") and not places.is_repository("a/b:Q8_0", files=False)


def test_offline(hub: LocalHub, request: pytest.FixtureRequest) -> None:
    found = located(f"{REPOSITORY}:q4_1")
    request.getfixturevalue("offline")
    assert located(f"{REPOSITORY}:q4_1") == found
    with pytest.raises(UnsupportedModelError, match=r"tiny-F32.gguf: .* there are: .*tiny-Q4_1.gguf"):
        located(f"{REPOSITORY}:tiny-F32.gguf")
