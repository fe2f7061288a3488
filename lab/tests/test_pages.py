"""`python -m winnow_lab.pages check`: pages of docs/results can be repeated, and one that cannot is named."""

import json
from pathlib import Path

import pytest

from winnow_lab.pages import Part, commits_of, notes, parts_of, problems

GOOD = "    python -m winnow_lab.speed.host_time\n\n(commit 61a026fd; a machine)\n"


@pytest.mark.parametrize("part", list(parts_of()), ids=lambda part: part.name)
def test_a_page_can_be_repeated(part: Part) -> None:
    assert list(problems(part)) == []


def test_what_is_written_beside_a_part_counts_too(tmp_path: Path) -> None:
    whole = "# Pages\n\nCommits 08f1da24, 61a026fd-dirty\n\n"
    (tmp_path / "page.md").write_text(whole + '<a id="page_two"></a>\n## Two\n\n(commit 51db36d2)\n')
    numbers = json.dumps({"command": ["winnow", "eval", "nothing"], "commit": "2f6f5ae8"})
    for name in ("page_two", "alone"):
        (tmp_path / f"{name}.json").write_text(numbers)
    first, second, alone = parts_of(tmp_path)
    assert (first.name, second.name, alone.name) == ("page", "page_two", "alone")
    assert commits_of(first) == ["08f1da24", "61a026fd"]
    assert list(notes(first)) == ["keeps no numbers beside it"]
    assert list(notes(first._replace(text=first.text + "[numbers](alone.json)"))) == []
    assert commits_of(second) == ["2f6f5ae8", "51db36d2"]
    assert list(problems(second)) == list(problems(alone)) == ["no such command: winnow eval nothing"]
    assert list(notes(second)) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, None),
        (GOOD.replace("61a026fd", "0123abcd"), "commit 0123abcd is not here"),
        (GOOD.replace("61a026fd", "0123abcd") + "no claim rests on this part", None),
        (GOOD.replace("(commit 61a026fd; a machine)", ""), "names no commit"),
        (GOOD.replace("host_time", "host_time --nothing 1"), "no such command"),
        (GOOD.partition("\n\n")[2], "names no command"),
        (GOOD.replace("speed.host_time", "real --policies snapkv,gone"), "no policy 'gone'"),
        (GOOD.replace("speed.host_time", "real.codecs --codecs 'int8;kivi4'"), "kivi4"),
        (GOOD.replace("speed.host_time", "papers kcache --extras select=pages"), "select=pages"),
    ],
)
def test_a_page_that_cannot_be_repeated_is_named(text: str, reason: str | None) -> None:
    found = list(problems(Part("page", text)))
    assert (found == []) if reason is None else (len(found) == 1 and reason in found[0]), found
