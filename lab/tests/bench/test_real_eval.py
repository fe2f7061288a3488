"""The evaluation of a real model: its rows, what counts as complete, its tables and its command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import save_gguf, tiny_llama

from winnow.values.eviction_request import Amount
from winnow_lab.evaluate.cell import AGNOSTIC, AWARE, FULL_CELL, Cell
from winnow_lab.evaluate.result import CellResult, Outcome, Refusal
from winnow_lab.real import command
from winnow_lab.real.command import RealOptions, result
from winnow_lab.real.rows import Row, Work, complete_cells, counts, row_of, works
from winnow_lab.real.tables import tables
from winnow_lab.study import parse
from winnow_lab.study.study import perform

SNAPKV = Cell("snapkv", Amount(4.0), AGNOSTIC)
KVZIP = Cell("kvzip", Amount(4.0), AGNOSTIC)


def outcome(cell: Cell, sample: str, score: float, question: int = 0) -> Outcome:
    return Outcome(cell.name, sample, question, "a", 200, score, "text", 90, 3, 3.5, 2048)


def row(work: str, cell: Cell, score: float | None, **fields: Any) -> Row:
    base = Row(
        work, cell.name, cell.preset, cell.query, cell.amount.compression, score, 0.1, 2, 2, 3.5, 2048.0
    )
    return replace(base, **fields)


# -- work ------------------------------------------------------------------------------------------------------------


def test_the_rows_in_their_order() -> None:
    found = list(works(("ruler", "needle", "documents", "gsm8k"), (512, 1024), 12, ("vt", "cwe")))
    assert [work.name for work in found] == [
        "ruler vt 512",
        "ruler cwe 512",
        "ruler vt 1024",
        "ruler cwe 1024",
        "needle 512",
        "needle 1024",
        "documents 4096",
        "gsm8k flexible",
    ]
    assert [work.tokens for work in found[-2:]] == [4096, 1024]
    needle, documents = found[4], found[6]
    # Samples are split over the depths, rounded up; many questions on a document stand for many samples.
    assert (needle.samples, len(needle.categories)) == (2, 11)
    assert (documents.samples, documents.questions) == (3, 20)
    assert documents.queries == (AGNOSTIC,) and needle.queries == (AWARE, AGNOSTIC)


def test_ruler_is_all_categories_but_the_one_that_needs_another_file() -> None:
    categories = [work.categories[0] for work in works(("ruler",), (512,), 1)]
    assert "niah_single_1" in categories and "qa_2" not in categories and len(categories) == 12


# -- rows ------------------------------------------------------------------------------------------------------------


def test_errors_are_over_contexts_not_answers() -> None:
    work = Work("w", "documents", ("facts",), 512, 2, questions=2)
    answers = [outcome(SNAPKV, "x", 1.0), outcome(SNAPKV, "x", 0.0, 1), outcome(SNAPKV, "y", 1.0)]
    found = row_of(work, CellResult(SNAPKV, tuple(answers)), seconds=2.0)
    assert (found.contexts, found.answers, found.score) == (2, 3, 0.75)
    assert found.error == pytest.approx(0.25)  # of 0.5 and 1.0
    assert (found.reached, found.kv_bytes, found.seconds) == (3.5, 2048.0, 2.0)
    alone = row_of(work, CellResult(SNAPKV, tuple(answers[:1])))
    assert (alone.score, alone.error) == (1.0, None)


def test_a_refused_cell_keeps_its_reason() -> None:
    work = Work("w", "needle-chat", ("0.1",), 512, 1)
    found = row_of(work, CellResult(SNAPKV, (), Refusal("too small", 1)))
    assert (found.score, found.error, found.contexts, found.refused) == (None, None, 0, "too small")


def test_a_category_counts_from_half_of_the_points() -> None:
    assert counts(row("w", FULL_CELL, 0.5))
    assert not counts(row("w", FULL_CELL, 0.49)) and not counts(row("w", FULL_CELL, None))
    assert counts(row("w", FULL_CELL, 0.49), 0.4)


class Plan:
    """Two samples, of one and two questions, in three cells."""

    cells = (FULL_CELL, SNAPKV, KVZIP)

    def make_samples(self) -> list[Any]:
        class Sample:
            def __init__(self, questions: int) -> None:
                self.questions = range(questions)

        return [Sample(1), Sample(2)]


def test_complete_are_cells_whose_every_answer_is_in_the_journal(tmp_path: Path) -> None:
    journal = tmp_path / "w-2.jsonl"
    plan: Any = Plan()
    assert complete_cells(journal, plan) == []
    lines = [{"winnow_eval": 1, "fingerprint": {}}]
    lines += [outcome(FULL_CELL, "x", 1.0).to_json()] * 3 + [outcome(SNAPKV, "x", 1.0).to_json()] * 2
    text = "".join(json.dumps(line) + "\n" for line in lines)
    # A kill left the third answer of snapkv torn.
    journal.write_text(text + json.dumps(outcome(SNAPKV, "y", 1.0).to_json())[:-5])
    assert complete_cells(journal, plan) == [FULL_CELL]
    journal.write_text(text + json.dumps(outcome(SNAPKV, "y", 1.0).to_json()) + "\n")
    assert complete_cells(journal, plan) == [FULL_CELL, SNAPKV]


# -- tables ----------------------------------------------------------------------------------------------------------

ROWS = [
    row("easy", FULL_CELL, 0.8),
    row("easy", SNAPKV, 0.4, error=0.05),
    row("easy", KVZIP, 0.8, error=0.0),
    row("hard", FULL_CELL, 0.2),
    row("other", FULL_CELL, 0.6),
    row("other", SNAPKV, None, refused="too small"),
    row("other", KVZIP, 0.3, error=0.0, seconds=1.5),
]


def test_tables_of_rows() -> None:
    full, means, categories, timed = tables(ROWS, [])
    assert dict(full.rows)["hard"] == ("0.20 ± 0.10", "2", "no", "2.0 KiB")
    assert dict(full.rows)["easy"][2] == ""
    assert means.title.startswith("Question later: share of the full cache's mean over 2 categories")
    # Snapkv was refused in one of two: its share is of the other alone.
    assert dict(means.rows) == {"snapkv": ("0.50 ± 0.06 of 1, 2.0 KiB",), "kvzip": ("0.79 ± 0.00, 2.0 KiB",)}
    assert categories.title == "Question later, 4x"
    assert {
        name: dict(zip(categories.columns, entries, strict=True)) for name, entries in categories.rows
    } == {
        "full cache": {"easy": "0.80 ± 0.10", "other": "0.60 ± 0.10"},
        "snapkv": {"easy": "0.40 ± 0.05", "other": "refused"},
        "kvzip": {"easy": "0.80 ± 0.00", "other": "0.30 ± 0.00"},
    }
    assert timed.rows == (
        ("full cache", ("0.60 ± 0.10", "", "2.0 KiB")),
        ("kvzip 4x", ("0.30 ± 0.00", "1.5", "2.0 KiB")),
    )


def test_cells_that_were_not_run_leave_their_entries_empty() -> None:
    rows = [row("a", FULL_CELL, 1.0), row("b", FULL_CELL, 1.0), row("a", SNAPKV, 1.0), row("b", KVZIP, 1.0)]
    _, means, categories = tables(rows, [])
    assert dict(means.rows)["snapkv"] == ("1.00 ± 0.10 of 1, 2.0 KiB",)
    entries = {name: dict(zip(categories.columns, found, strict=True)) for name, found in categories.rows}
    assert entries["snapkv"] == {"a": "1.00 ± 0.10", "b": ""}


def test_files_hold_every_row(tmp_path: Path) -> None:
    facts = {"model": "tiny.gguf", "engine": {"dtype": "bfloat16"}, "chat_template": True}
    options = RealOptions(model="tiny.gguf", output=tmp_path / "out")
    assert perform(options, lambda _: result(facts, 0.5, ROWS, []), "real") == 0
    written = json.loads((tmp_path / "out" / "real.json").read_text())
    assert [each["cell"] for each in written["rows"]] == [each.cell for each in ROWS]
    assert written["rows"][1]["reached"] == 3.5 and written["perplexity"] == []
    page = (tmp_path / "out" / "real.md").read_text()
    assert "| hard | 0.20 ± 0.10 | 2 | no | 2.0 KiB |" in page and "tiny.gguf, bfloat16" in page


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tasks ruler,rular", "--tasks: no 'rular'; known: ruler, needle"),
        ("--presses KVzap", "--presses: no 'KVzap'"),
        ("--query sen", "no 'sen'; known: seen, later"),
        ("--kvpress env --kvpress-model nowhere", "--kvpress needs --kvpress-model DIR"),
        ("--samples many", "argument --samples"),
        ("--samples 0", "--samples must be at least 1, got 0"),
    ],
)
def test_what_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(RealOptions, "", ["--model", "model.gguf", *words.split()])
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_a_model_it_says_where_one_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        parse(RealOptions, "", [])
    assert "run make real-model" in capsys.readouterr().err
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M.gguf").touch()
    assert parse(RealOptions, "", []).model == "models/SmolLM2-135M.gguf"


def test_query_modes_are_named_by_what_the_policy_has_seen() -> None:
    assert parse(RealOptions, "", ["--model", "m", "--query", "seen"]).query == (AWARE,)
    assert parse(RealOptions, "", ["--model", "m"]).query == (AWARE, AGNOSTIC)


@pytest.mark.slow
def test_a_run_is_written_and_goes_on(tmp_path: Path) -> None:
    """A model of random weights knows no needle: the full cache is run, written, and not run again."""
    model = save_gguf(tmp_path / "tiny.gguf", tiny_llama())
    words = ["--model", str(model), "--tasks", "needle", "--tokens", "400", "--samples", "1"]
    words += ["--dtype", "float32"]
    words += ["--kv-memory", "8MiB", "--work", str(tmp_path / "work"), "-o", str(tmp_path / "out")]
    command.main(words)
    [journal] = (tmp_path / "work").iterdir()
    assert journal.name == "needle-400-1.jsonl"
    before = journal.read_bytes()
    [written] = json.loads((tmp_path / "out" / "real.json").read_text())["rows"]
    assert (written["work"], written["cell"], written["answers"]) == ("needle 400", "full cache", 11)
    for more in ([], ["--report"]):
        command.main([*words, *more])
        assert journal.read_bytes() == before
    assert json.loads((tmp_path / "out" / "real.json").read_text())["rows"] == [written]
