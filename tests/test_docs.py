"""Pages for readers: links lead somewhere, commands exist and parse, and prose holds no date, machine or commit."""

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.papers.__main__ import STUDIES
from winnow.cli.main import COMMANDS, Parser
from winnow.errors import UsageError

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
LINKING = [*PAGES, *sorted((ROOT / "docs").glob("*/*.md"))]

# Results measured before their commands were renamed. A page made anew leaves this list.
OUTDATED = {
    f"docs/results/{name}.md"
    for name in ["batch_max", "batch_max_leverage", "baton", "h2h", "kv_compress", "kvpress"]
}

LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
PROVENANCE = re.compile(
    rf"\b20\d\d-\d\d-\d\d\b|\b(?:{MONTHS}) 20\d\d\b|\bZen \d|\bEPYC\b|\bXeon\b|\bcommit [0-9a-f]{{7}}"
)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(page.read_text()))
    return {title.strip().replace(" ", "-") for title in titles}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in code blocks and code spans, without comment and redirection."""
    text = re.sub(r"\\\n\s*", "", text)
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4}(.*)$", text, re.MULTILINE)
    lines = [line.removeprefix("$ ") for block in fenced for line in block.splitlines()] + indented
    spans = [re.sub(r"\s*\n\s*", " ", span) for span in re.findall(r"`([^`]+)`", text)]
    for command in [*lines, *(span for span in spans if " -" in span)]:
        if re.match(r"(winnow|python|make|pytest|\.venv/bin/\w+) \S", command) and "..." not in command:
            for part in re.split(r" && | \| ", command.replace("$'", "'")):
                words = shlex.split(part, comments=True)
                yield [
                    words[0].removeprefix(".venv/bin/"),
                    *(word for word in words[1:] if word[0] not in "[>"),
                ]


def parse(module: str, words: list[str]) -> None:
    """Parse the arguments of a command as the command line does.

    Raises:
        UsageError: they would be refused.
    """
    parser = Parser()
    import_module(module).configure(parser)
    try:
        _, unknown = parser.parse_known_args(words)
    except SystemExit:  # --help
        return
    assert not unknown, unknown


def check(program: str, words: list[str], targets: set[str]) -> None:
    """Assert that a command exists, and that its arguments parse where that is cheap to tell."""
    if program == "winnow" and words[0] in COMMANDS:
        parse(f"winnow.cli.{words[0].replace('-', '_')}", words[1:])
    elif program == "make":
        assert words[0] in targets
    elif words[:2] == ["-m", "benchmarks.papers"]:
        if words[2:] and not words[2].startswith("-"):
            assert words[2] in STUDIES
            parse(f"benchmarks.papers.{words[2].replace('-', '_')}.command", words[3:])
    elif words[0] == "-m" and words[1].startswith("benchmarks"):
        path = ROOT / words[1].replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    elif program in ("python", "pytest"):
        for word in words:
            if word.startswith(("tests/", "benchmarks/", "training/", "examples/")):
                assert (ROOT / word.partition("::")[0]).exists(), word


@pytest.mark.parametrize("page", names(LINKING))
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if not path.startswith(("http:", "https:", "mailto:")):
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", names(LINKING))
def test_commands_exist_and_parse(page: str, request: pytest.FixtureRequest) -> None:
    if page in OUTDATED:
        request.applymarker(pytest.mark.xfail(strict=True))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for program, *words in commands((ROOT / page).read_text()):
        try:
            check(program, words, targets)
        except (AssertionError, UsageError, argparse.ArgumentError) as error:
            if not re.search("arguments are required|expected one argument|No such file", str(error)):
                pytest.fail(f"{program} {shlex.join(words)}: {error}")


@pytest.mark.parametrize("page", names(PAGES))
def test_provenance_stands_in_results(page: str) -> None:
    """Dates, machines and commits are in docs/results, beside the numbers."""
    assert not PROVENANCE.findall((ROOT / page).read_text())


def test_the_readme_is_a_page() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 90
    assert "make test" in "".join(lines[:12]) and "make demo" in "".join(lines[:12]), "its first screen"
    assert sum("](docs/results/payoff.svg)" in line for line in lines) == 1


def test_the_first_fact_is_that_of_the_results() -> None:
    """Work p1 on SmolLM2: `winnow-seen` at 8x beside the full cache and OpenVINO's."""
    works = json.loads((ROOT / "docs/results/payoff.json").read_text())["works"]
    work = next(each for each in works if each["work"] == "p1" and each["model"].startswith("SmolLM2"))
    rows = {(row["peer"], row["configuration"]): row for row in work["configurations"]}
    ours, full = rows["winnow", "winnow-seen 8x"], rows["winnow", "full cache"]
    speed = ours["median"]
    fact = (ROOT / "README.md").read_text().partition("## Five facts")[2].partition("\n2. ")[0]
    assert f"{speed / full['median']:.1f} times the tokens per second" in fact
    assert f"{speed / rows['openvino', 'bf16 KVs']['median']:.1f} times OpenVINO's" in fact
    right = [100 * fmean(row["scores"]) for row in (ours, full)]
    assert [round(float(number)) for number in re.findall(r"(\d+) ± ", fact)] == [
        round(each) for each in right
    ]
