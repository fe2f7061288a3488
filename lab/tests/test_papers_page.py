"""docs/papers.md: what it names exists, and tables of one text have one shape."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from winnow_lab.checkout import ROOT

PAGE = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
TEXTS = ("KV-Compress", "Batch-Max", "The text on KV cache memory", "BATON", "KCache")
CODE = sorted({code for code in re.findall(r"`([^`\n]+)`", PAGE) if " " not in code})


def rows(text: str) -> list[list[str]]:
    """The items of a text's table."""
    part = PAGE.partition(f"## {text}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


@pytest.mark.parametrize("name", [code for code in CODE if re.fullmatch(r"winnow(_lab)?(\.\w+)+", code)])
def test_modules_exist(name: str) -> None:
    module, _, member = name.rpartition(".")
    if member[0].isupper():
        found = find_spec(module)
        assert found is not None and found.origin is not None
        assert re.search(rf"\b{member}\b", Path(found.origin).read_text(encoding="utf-8"))
    else:
        assert find_spec(name) is not None


@pytest.mark.parametrize("name", [code for code in CODE if re.match(r"(lab|tests|src|native)/", code)])
def test_files_exist(name: str) -> None:
    assert (ROOT / name).exists()


@pytest.mark.parametrize("text", TEXTS)
def test_every_item_says_where_it_is(text: str) -> None:
    labels = set(re.findall(r"^    .*# ([A-Z]\d):", PAGE, re.MULTILINE))
    assert len(rows(text)) >= 25
    for item, _, where, *_ in (row for row in rows(text) if len(row) == 5):
        named = re.findall(r"\b[A-Z]\d\b(?![.\d])", where)
        assert named or "`" in where or "](" in where, item
        assert set(named) <= labels, item
    assert all(len(row) == 5 for row in rows(text))
