"""Pages for readers: links lead somewhere, and prose holds no date, machine or commit."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
LINKING = [*PAGES, *sorted((ROOT / "docs").glob("*/*.md"))]

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


@pytest.mark.parametrize("page", names(LINKING))
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if not path.startswith(("http:", "https:", "mailto:")):
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


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
