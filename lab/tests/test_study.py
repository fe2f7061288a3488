"""Studies: flags from a dataclass, results as files, and an index that names what there is."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from winnow_lab.checkout import ROOT
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, in_turn, parse, run_study
from winnow_lab.study.index import PAGES, STUDIES, results_page
from winnow_lab.study.parts import page_of, read_parts, with_titles, write_part

RESULTS = ROOT / "docs/results"


@dataclass(frozen=True)
class Options(StudyOptions):
    """Flags of each kind."""

    model: str | None = flag(None, positional=True)
    sizes: tuple[int, ...] = flag((1, 2), "sizes", least=1)
    mode: str = flag("slow", choices=("slow", "fast"))
    folder: Path = flag()
    quick: bool = flag(False)
    rate: float = flag(0.5, least=0.25)


def counted(options: Options) -> Iterator[Result]:
    """Yield after each round, the square of each size."""
    for rows in in_turn({f"{size}": size for size in options.sizes}, 2, lambda size: size**2):
        table = TextTable.of("Squares", "size", rows, {"square": lambda each: f"{each[-1]}"})
        yield Result("A study", [table], ["A fact."], "notes\n", {"rows": [rows]})


def test_flags_are_fields() -> None:
    words = ["m.gguf", "--sizes", "4, 8", "--mode", "fast", "--folder", "x", "--quick", "--rate", "1"]
    assert parse(Options, "", words) == Options(
        model="m.gguf", sizes=(4, 8), mode="fast", folder=Path("x"), quick=True, rate=1.0
    )
    assert parse(Options, "", ["--folder", "x"]).sizes == (1, 2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--sizes", "4,0"], "--sizes must be at least 1, got 0"),
        (["--rate", "0.1"], "--rate must be at least 0.25, got 0.1"),
        (["--mode", "quick"], "--mode: invalid choice: 'quick' (choose from 'slow', 'fast')"),
        (["--size", "4"], "unrecognized arguments: --size"),
        (["--sizes", "four"], "invalid int list value: 'four'"),
    ],
)
def test_mistyped_options_are_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Options, "", ["--folder", "x", *words])
    assert stop.value.code == 2 and reason in capsys.readouterr().err


def test_results_are_written_with_where_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["-o", str(tmp_path), "--name", "squares", "--json", str(tmp_path / "all.json")]
    assert run_study(Options, counted, ["--folder", "x", "--sizes", "3", *files]) == 0
    assert "A fact." in capsys.readouterr().out
    written = json.loads((tmp_path / "squares.json").read_text())
    assert written == json.loads((tmp_path / "all.json").read_text())
    assert written["rows"] == [{"3": [9, 9]}] and {"command", "commit", "date", "machine"} <= set(written)
    page = (tmp_path / "squares.md").read_text()
    assert page.startswith("# A study") and "| 3 | 9 |" in page and "notes" in page


def test_what_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ["--folder", "x", "--json", str(tmp_path / "file" / "all.json")]
    with pytest.raises(SystemExit, match="error: cannot write"):
        run_study(Options, lambda _: pytest.fail("nothing may be measured"), words)


def test_a_part_is_written_among_others(tmp_path: Path) -> None:
    page = tmp_path / page_of("baton_demo")
    for name, text in (
        ("baton_demo", "one"),
        ("baton", "first"),
        ("baton_sizes", "two"),
        ("baton_demo", "new"),
    ):
        write_part(page, name, f"# Title\n\n{text}\n\n## Table\n")
    assert [line for line in page.read_text().splitlines() if line] == [
        "# Title",
        "first",
        "## Table",
        '<a id="baton_demo"></a>',
        f"## {PAGES['baton_demo'].settled.capitalize()}",
        "new",
        "### Table",
        '<a id="baton_sizes"></a>',
        f"## {PAGES['baton_sizes'].settled.capitalize()}",
        "two",
        "### Table",
    ]


def test_the_list_names_what_exists_and_every_result() -> None:
    pages = sorted(RESULTS.glob("*.md"))
    there = [name for page in pages if page.stem != "README" for name in read_parts(page)]
    listed = [page.name for each in STUDIES for page in each.pages]
    assert sorted(there) == sorted(each for each in listed if not each.endswith(".json"))
    # Numbers that studies wrote beside their pages, and what a page shows or names.
    others = {path.name for path in RESULTS.iterdir() if path.suffix != ".md"}
    texts = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert {name for name in others if name not in texts and Path(name).stem not in PAGES} == set()
    assert {name for name in PAGES if name.endswith(".json")} <= others
    for each in STUDIES:
        program, *words = each.command.split()
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]) is not None, each.command
        elif program == "python":
            assert (ROOT / words[0]).is_file()


def test_what_pages_take_from_the_list_is_up_to_date() -> None:
    for page in RESULTS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert text == (results_page() if page.stem == "README" else with_titles(text)), (
            "python -m winnow_lab --write"
        )


def test_listing_needs_no_torch() -> None:
    code = "import sys, runpy; sys.argv[1:] = []; runpy.run_module('winnow_lab', run_name='__main__'); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(STUDIES)
