"""The command line over an engine without a model."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM

Write = Callable[[Iterable[Any]], Path]


@pytest.fixture
def write_prompts(tmp_path: Path) -> Write:
    """Write lines to prompts.jsonl: objects as JSON, text as it is."""

    def write(lines: Iterable[Any]) -> Path:
        path = tmp_path / "prompts.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        return path

    return write


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """Commands open fake engines, which are collected in the list."""
    opened: list[FakeLLM] = []

    def open_fake(options: dict[str, Any], *, announce: bool = False, quiet: bool = False) -> FakeLLM:
        opened.append(FakeLLM(**options))
        return opened[-1]

    monkeypatch.setattr("winnow.cli.flags.engine.open_llm", open_fake)
    return opened
