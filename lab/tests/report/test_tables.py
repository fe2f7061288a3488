"""Tables of text: upright, as Markdown, on the terminal."""

import io

from rich.console import Console

from winnow_lab.report.tables import Footnotes, TextTable

WIDE = TextTable("t", "c", ("a", "b", "d"), (("x", ("1", "2", "3")),), across="across")


def test_tables_stand_upright() -> None:
    tall = WIDE.upright()
    assert tall.corner == "across"
    assert tall.columns == ("x",)
    assert tall.rows == (("a", ("1",)), ("b", ("2",)), ("d", ("3",)))
    assert tall.upright() == tall
    assert tall.transposed() == WIDE


def test_markdown_has_a_heading_alignment_and_notes() -> None:
    table = TextTable(
        "A title", "name", ("n", "told"), (("x", ("1", "a|b")),), ("first", "second"), words=(1,)
    )
    assert table.markdown() == [
        "## A title",
        "",
        "| name | n | told |",
        "| --- | ---: | --- |",
        "| x | 1 | a\\|b |",
        "",
        "first  ",
        "second  ",
        "",
    ]
    assert WIDE.markdown()[-2:] == ["| x | 1 | 2 | 3 |", ""]


def test_the_terminal_has_every_entry_and_dense_tables_no_lines_between_columns() -> None:
    def shown(dense: bool) -> str:
        console = Console(width=60, file=io.StringIO())
        with console.capture() as capture:
            console.print(WIDE.rich(dense=dense))
        return capture.get()

    for dense in (False, True):
        assert ["x", "1", "2", "3"] in [line.replace("│", " ").split() for line in shown(dense).splitlines()]
    assert "│" in shown(False) and "│" not in shown(True)


def test_footnotes_say_each_thing_once() -> None:
    notes = Footnotes()
    assert [notes.mark("a"), notes.mark("b"), notes.mark("a")] == ["[1]", "[2]", "[1]"]
    assert notes.lines(["c"]) == ("[1] a", "[2] b", "c")
