"""Commands in README and docs can be typed, and results name commands that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented import ROOT, check, commands, is_command, words
from tests.extension import needs_extension

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts),
    *(ROOT / "examples").rglob("*.md"),
    *(ROOT / "training").glob("*.md"),
    ROOT / "src/winnow/models/demo/README.md",
]
RESULTS = [
    path
    for path in sorted((ROOT / "docs/results").iterdir())
    if path.suffix in (".json", ".md") and path.name != "README.md"
]


@pytest.mark.parametrize(
    "page",
    [
        # Benchmarks of kernels import them.
        pytest.param(path, marks=needs_extension if path.name == "performance.md" else ())
        for path in PAGES
    ],
    ids=[str(path.relative_to(ROOT)) for path in PAGES],
)
def test_commands_of_a_page_parse(
    page: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for line in commands(page):
        wrong = check(words(line), monkeypatch)
        printed = capfd.readouterr()
        # Prose names a command alone, `winnow run`, or leaves out what is not its subject.
        named = "arguments are required" in printed.err or "usage:" in printed.out
        left_out = "--" not in line or "..." in line
        of_a_reader = "No such file" in printed.err or any(
            f"'{word}'" in printed.err for word in words(line) if word.isupper()
        )
        assert wrong is None or of_a_reader or (left_out and named), f"{line}\n{wrong}: {printed.err}"


@pytest.mark.parametrize("file", RESULTS, ids=lambda path: path.name)
def test_a_result_names_a_command_that_exists(
    file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = file.read_text(encoding="utf-8")
    found = list(shown(text) if file.suffix == ".md" else recorded(json.loads(text)))
    assert found, "no command repeats it"
    for command in found:
        wrong = [check(each, monkeypatch) for each in candidates(command)]
        assert None in wrong, f"{command}\n{wrong}: {capfd.readouterr().err}"


def shown(text: str) -> Iterator[list[str]]:
    """Yield the command lines of a page: indented lines, and code within a sentence."""
    for line in re.findall(r"^    (\S.*)$|`([^`]+)`", text, re.MULTILINE):
        code = line[0] or line[1]
        if is_command(code) or code.split(" ")[0].endswith(".py"):
            yield words(code)


def recorded(value: Any) -> Iterator[list[str]]:
    """Yield the command lines of a result; scripts are recorded by name, from wherever they were run."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "command":
                yield each
            else:
                yield from recorded(each)
    elif isinstance(value, list):
        for each in value:
            yield from recorded(each)


def candidates(command: list[str]) -> Iterator[list[str]]:
    """Yield what was typed; scripts are recorded by name, and several have it."""
    first, *rest = command
    if not first.endswith(".py"):
        yield [Path(first).name, *rest]
        return
    for script in (ROOT / "lab/winnow_lab").rglob(Path(first).name):
        yield ["python", str(script.relative_to(ROOT)), *rest]


@pytest.mark.parametrize(
    "line",
    [
        "winnow run a.jsonl -o b.jsonl --evictions snapkv",
        "winnow bench h2h --samples 3",
        "python -m winnow_lab.papers winnow",
        "python -m winnow_lab.nothing",
        "python lab/winnow_lab/nothing.py",
        "python -m winnow_lab.answers.same_answers --nothing",
        "make nothing",
        "pytest tests/nothing",
    ],
)
def test_a_command_that_cannot_be_typed_is_found(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(words(line), monkeypatch) is not None
