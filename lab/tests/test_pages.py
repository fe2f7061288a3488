"""`python -m winnow_lab.pages check`: pages of docs/results can be repeated, and one that cannot is named."""

import json
from pathlib import Path

import pytest

from winnow_lab.pages import RESULTS, commits_of, notes, problems

PAGES = [
    path
    for path in sorted(RESULTS.iterdir())
    if (path.suffix == ".md" and path.stem != "README")
    or (path.suffix == ".json" and not path.with_suffix(".md").exists())
]
GOOD = "    python -m winnow_lab.speed.host_time\n\n(commit 61a026fd; a machine)\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_can_be_repeated(page: Path) -> None:
    assert list(problems(page)) == []


def test_what_is_written_beside_a_page_counts_too(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Commits 08f1da24, 61a026fd-dirty\n")
    assert list(notes(page)) == ["keeps no numbers beside it"]
    page.with_suffix(".json").write_text(
        json.dumps({"command": ["winnow", "eval", "nothing"], "commit": "2f6f5ae8"})
    )
    assert commits_of(page) == ["08f1da24", "2f6f5ae8", "61a026fd"]
    assert list(problems(page)) == ["no such command: winnow eval nothing"]
    assert list(notes(page)) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, None),
        (GOOD.replace("61a026fd", "0123abcd"), "commit 0123abcd is not here"),
        (GOOD.replace("61a026fd", "0123abcd") + "no claim rests on this page", None),
        (GOOD.replace("(commit 61a026fd; a machine)", ""), "names no commit"),
        (GOOD.replace("host_time", "host_time --nothing 1"), "no such command"),
        (GOOD.partition("\n\n")[2], "names no command"),
        (GOOD.replace("speed.host_time", "real --policies snapkv,gone"), "no policy 'gone'"),
        (GOOD.replace("speed.host_time", "real.codecs --codecs 'int8;kivi4'"), "kivi4"),
        (GOOD.replace("speed.host_time", "papers kcache --extras select=pages"), "select=pages"),
    ],
)
def test_a_page_that_cannot_be_repeated_is_named(text: str, reason: str | None, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    found = list(problems(page))
    assert (found == []) if reason is None else (len(found) == 1 and reason in found[0]), found
