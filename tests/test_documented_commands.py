"""Commands in README and docs can be typed; those of results: lab/tests/test_pages.py."""

from pathlib import Path

import pytest
from documented import ROOT, check, commands, words
from tests.extension import needs_extension

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts),
    *(ROOT / "examples").rglob("*.md"),
    *(ROOT / "training").glob("*.md"),
    ROOT / "src/winnow/models/demo/README.md",
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


@pytest.mark.parametrize(
    "line",
    [
        "winnow run a.jsonl -o b.jsonl --evictions snapkv",
        "winnow bench h2h --samples 3",
        "python -m winnow_lab.papers winnow",
        "python -m winnow_lab.nothing",
        "python lab/winnow_lab/nothing.py",
        "python -m winnow_lab.speed.host_time --nothing",
        "make nothing",
        "pytest tests/nothing",
    ],
)
def test_a_command_that_cannot_be_typed_is_found(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(words(line), monkeypatch) is not None
