"""The KV-Compress study: its cells, its arithmetic, resuming after an interruption, and what it measures."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import save_tiny_llama

from winnow.errors import EvaluationError
from winnow_lab.evaluate.sample import Question
from winnow_lab.papers.__main__ import main
from winnow_lab.papers.judged import TimedPrompt
from winnow_lab.papers.kv_compress.measure import (
    FULL,
    Cell,
    Options,
    Run,
    cell_prompts,
    random_prompts,
    runs_of,
)
from winnow_lab.papers.kv_compress.results import (
    BEST_GAIN,
    PUBLISHED,
    Row,
    all_tables,
    beside_the_paper,
    figures,
    read_rows,
)
from winnow_lab.study.journal import CellJournal

WHOLE_PROMPT, P_AND_D = Options().policies
RUN = Run(
    seconds=8.0,
    total_tokens=800,
    decoding_steps=10,
    mean_batch=2.0,
    most_batch=2,
    preemptions=0,
    rounds=0,
    kv_bytes_peak=100,
    parts={"execute": 1.0},
    reached=1.0,
    scores=[1.0, 0.5],
    categories=["needle", "needle"],
)


def took(*seconds: float) -> tuple[Run, ...]:
    return tuple(replace(RUN, seconds=each) for each in seconds)


TWO = Options(contexts=(32, 64), compressions=(8.0,))


def a_journal(path: Path | None = None) -> CellJournal:
    """Two contexts, compressions 1 and 8; the longer context was measured, each cell once."""
    journal = CellJournal(path, TWO.identity({"dtype": "float32"}))
    seconds = {
        Cell(64): 8.0,
        Cell(64, prefill_only=True): 2.0,
        Cell(64, WHOLE_PROMPT, 8.0): 4.0,
        Cell(64, P_AND_D, 8.0): 2.5,
        Cell(64, P_AND_D, 8.0, prefill_only=True): 1.0,
    }
    for cell, each in seconds.items():
        journal.add(cell.key, asdict(replace(RUN, seconds=each, most_batch=1 if cell.preset == FULL else 5)))
    return journal


# -- cells and arithmetic --------------------------------------------------------------------------------------------


def test_every_policy_stands_between_what_it_is_compared_with() -> None:
    options = Options(contexts=(512, 64), compressions=(8.0, 1.0, 2.0))
    assert list(options.cells())[7:] == [
        Cell(64, prefill_only=True),
        Cell(64),
        Cell(64, WHOLE_PROMPT, 2.0),
        Cell(64, P_AND_D, 2.0),
        Cell(64, WHOLE_PROMPT, 8.0),
        Cell(64, P_AND_D, 8.0),
        Cell(64, P_AND_D, 8.0, prefill_only=True),
    ]
    assert {cell.context for cell in list(options.cells())[:7]} == {512}
    assert Cell(64).options == {}
    assert Cell(64, P_AND_D, 2.0).options == {"eviction": "kv-compress-pd", "compression": 2.0}
    assert (options.answer_tokens(512), options.longest_sequence) == (64, 576)
    assert Options(contexts=(512,), new_tokens=10).longest_sequence == 522
    assert len(list(Options(contexts=(64,), compressions=(1.0,)).cells())) == 2


def test_any_two_presets_stand_side_by_side() -> None:
    options = Options(contexts=(64,), compressions=(8.0,), whole="winnow", p_and_d="keydiff")
    assert [cell.preset for cell in options.cells()] == [FULL, FULL, "winnow", "keydiff", "keydiff"]


def test_gain_bound_and_share_compare_times_of_one_turn() -> None:
    # In the second turn the machine was half as fast: ratios within a turn do not notice.
    row = Row(
        Cell(64, P_AND_D, 8.0), took(2.5, 5.0), full=took(8.0, 16.0), prefill=took(2, 4), own_prefill=took(1)
    )
    assert (row.gain, row.bound, row.share, row.own_bound) == (3.2, 4.0, 0.8, 8.0)
    assert row.gain == pytest.approx(row.bound * row.share)
    assert row.rates == (240.0, 160.0, 320.0)
    assert replace(row, own_prefill=()).own_bound is None
    of_three = replace(row, runs=took(2, 4, 1), full=took(8, 8, 8), prefill=took(2, 2, 2))
    assert of_three.gain == 4.0


def test_rows_need_what_they_are_compared_with() -> None:
    rows = read_rows(TWO, a_journal())
    assert [(row.cell.context, row.cell.preset) for row in rows] == [
        (64, FULL),
        (64, WHOLE_PROMPT),
        (64, P_AND_D),
    ]
    full, whole, pd = rows
    assert (full.gain, whole.gain, pd.gain) == (1.0, 2.0, 3.2)
    assert {row.bound for row in rows} == {4.0}
    assert (whole.own_bound, pd.own_bound) == (None, 8.0)
    assert full.first.accuracy == 0.75


def test_tables_show_both_policies_side_by_side_and_the_bound_in_every_line() -> None:
    side, details, contexts, paper = all_tables(TWO, read_rows(TWO, a_journal()))
    assert side.rows == (
        ("1x", ("4.00x", "1.00x", "25%", "1", "0.75", "1.00x", "25%", "1", "0.75")),
        ("8x", ("4.00x", "2.00x", "50%", "5", "0.75", "3.20x", "80%", "5", "0.75")),
    )
    assert [name for name, _ in details.rows] == ["full", "whole", "P&D"]
    assert [entries[details.columns.index("bound")] for _, entries in details.rows] == ["4.00x"] * 3
    assert all(
        len(entries) == len(table.columns)
        for table in (side, details, contexts, paper)
        for _, entries in table.rows
    )


def test_scores_stand_in_per_cent_of_the_full_caches_by_context_and_category() -> None:
    journal = CellJournal(None, {})
    asked = {"categories": ("a", "a", "b")}
    for context, half in ((32, 0.5), (64, 0.25)):
        for cell in TWO.cells():
            if cell.context == context:
                scores = (1.0, 1.0, 0.0) if cell.preset == FULL else (half, half, 0.5)
                parts = {"evict": 0.08 if cell.preset == P_AND_D else 0.0}
                rounds = 4 if cell.preset == P_AND_D else 0
                run = replace(RUN, scores=scores, parts=parts, rounds=rounds, **asked)
                journal.add(cell.key, asdict(run))
    rows = read_rows(TWO, journal)
    tables = {table.title: table for table in all_tables(TWO, rows)}
    of_64 = tables["64 + 8 tokens: score in per cent of the full cache's"]
    assert of_64.columns == ("a", "b")
    # The full cache answers nothing of b: there is nothing to divide by.
    assert of_64.rows == (
        ("full, score", ("1.00", "0.00")),
        ("kv-compress 8x", ("25%", "")),
        ("kv-compress-pd 8x", ("25%", "")),
    )
    contexts = tables["Score in per cent of the full cache's, by tokens of the prompt"]
    assert contexts.columns == ("32 + 4 tokens", "64 + 8 tokens")
    assert contexts.rows == (
        ("full, score", ("0.67", "0.67")),
        ("kv-compress 8x", ("75%", "50%")),
        ("kv-compress-pd 8x", ("75%", "50%")),
    )
    details = tables["64 + 8 tokens, each policy"]
    shown = [
        [entries[details.columns.index(name)] for _, entries in details.rows] for name in ("each", "of run")
    ]
    assert shown == [["", "", "20.0 ms"], ["0.0%", "0.0%", "1.0%"]]
    assert [row.to_json()["round_seconds"] for row in rows[-3:]] == [0.0, 0.0, 0.08]


def test_the_papers_gains_stand_beside_the_nearest_context_at_the_same_compression() -> None:
    rows = [
        Row(Cell(context, preset, 64.0), took(2.0), took(8.0), took(1.0))
        for context in (512, 4096)
        for preset in (WHOLE_PROMPT, P_AND_D)
    ]
    lines = [entries for _, entries in beside_the_paper(Options(), rows).rows]
    assert len(lines) == len(PUBLISHED) and lines[0][1] == f"{BEST_GAIN:.2f}x" == "5.18x"
    assert lines[0][2:4] == ("4.00x at 4096", "4.00x at 4096")
    assert lines[1][2:4] == ("", "")  # nothing at 32x


def test_figures_are_drawn_with_and_without_scores() -> None:
    def drawn(run: Run | None) -> dict[str, list[str]]:
        rows = read_rows(TWO, a_journal())
        rows = [replace(row, runs=(run,), full=(run,)) for row in rows] if run else rows
        return {name: [axes.get_title() for axes in draw().axes] for name, draw in figures(TWO, rows).items()}

    titles = drawn(None)
    assert list(titles) == ["_figure1", "_figure7", "_figure8"] and "Accuracy" in titles["_figure1"][0]
    assert "Accuracy" not in drawn(replace(RUN, scores=(), categories=()))["_figure1"][0]
    assert list(drawn(replace(RUN, categories=("first", "second"))))[-1] == "_figure4"


# -- mixed lengths ---------------------------------------------------------------------------------------------------


def test_mixed_prompts_share_one_cell() -> None:
    options = Options(contexts=(64, 32, 16), compressions=(8.0,), mixed=True, requests=7)
    assert {cell.context for cell in options.cells()} == {64}
    assert options.lengths(64) == "16 to 64 mixed + 8 tokens"
    prompts = cell_prompts(options, 64, lambda context: random_prompts(50, context, options.requests, seed=0))
    assert [len(prompt.token_ids) for prompt in prompts] == [16, 32, 64, 16, 32, 64, 16]
    assert len({prompt.token_ids for prompt in prompts}) == 7
    apart = replace(options, mixed=False)
    assert {
        len(each.token_ids) for each in cell_prompts(apart, 32, lambda n: random_prompts(50, n, 7, 0))
    } == {32}


def test_a_study_resumes_where_it_stopped(tmp_path: Path) -> None:
    first = a_journal(tmp_path / "cells.jsonl")
    again = CellJournal(tmp_path / "cells.jsonl", TWO.identity({"dtype": "float32"}))
    assert again.rows == first.rows and runs_of(again, Cell(64))[0].seconds == 8.0
    with pytest.raises(EvaluationError, match="requests"):
        CellJournal(tmp_path / "cells.jsonl", replace(TWO, requests=5).identity({"dtype": "float32"}))


# -- prompts ---------------------------------------------------------------------------------------------------------


class Speller:
    """A tokenizer whose tokens are letters."""

    eos_token_id = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens)


def test_an_answer_is_scored_up_to_its_end_of_text() -> None:
    question = Question("?", ("yes",), "exact", max_tokens=4)
    shown = [ord(letter) for letter in "yes"]
    prompt = TimedPrompt((1, 2), question)
    assert prompt.score([*shown, 0, ord("n")], Speller()) == 1.0
    assert prompt.score([*shown, ord("n"), 0], Speller()) == 0.0
    assert prompt.score([*shown, ord(" "), ord("n")], Speller()) == 1.0  # cut at the question's own limit
    assert TimedPrompt((1, 2)).score(shown, None) is None


def test_random_prompts_are_the_same_for_every_engine() -> None:
    prompts = random_prompts(50, 20, 3, seed=1)
    assert prompts == random_prompts(50, 20, 3, seed=1) != random_prompts(50, 20, 3, seed=2)
    assert [len(prompt.token_ids) for prompt in prompts] == [20] * 3


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("bench") / "model", seed=0)


WORK = "--dtype float32 --requests 12"


def run(folder: Path, *typed: str) -> dict[str, Any]:
    """The report of the command."""
    files = ("-o", str(folder), "--journal", str(folder / "cells.jsonl"))
    assert main(["kv-compress", *WORK.split(), *typed, *files]) == 0
    report: dict[str, Any] = json.loads((folder / "kv_compress.json").read_text())
    return report


def test_the_batch_grows_with_compression_and_more_so_with_rounds_in_the_prompt(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["--model", str(model), "--contexts", "1536", "--new-tokens", "40", "--compressions", "1,48"]
    typed += ["--kv-floor", "32", "--kv-seqs", "2", "--requests", "24"]
    report = run(tmp_path, *typed)
    full, whole, pd = report["rows"]
    assert full["most_batch"] == 2 < whole["most_batch"] < pd["most_batch"] / 1.2
    assert full["reached"] == 1.0 and whole["reached"] > 16 < pd["reached"]
    assert full["rounds"] == 0 < whole["rounds"] < pd["rounds"]
    for row in report["rows"]:
        assert row["gain"] == pytest.approx(row["bound"] * row["share"])
        assert 0 < row["kv_bytes_peak"] <= report["engine"]["kv_memory"]
        assert row["accuracy"] is None
    shown = capsys.readouterr().out
    assert "1536 + 40 tokens" in shown and "P&D gain" in shown and "5.18x" in shown
    page = (tmp_path / "kv_compress.md").read_text()
    assert "| 48x |" in page and "kv_compress_figure8.svg" in page
    assert (tmp_path / "kv_compress_figure8.svg").is_file()
    assert run(tmp_path, *typed)["rows"] == report["rows"], "nothing is measured again"


def test_mixed_lengths_run_in_one_batch(model: Path, tmp_path: Path) -> None:
    typed = "--contexts 64,256 --mixed --new-tokens 8 --compressions 1,8 --kv-floor 9 --requests 6"
    run(tmp_path, "--model", str(model), *typed.split(), "--repeat", "2")
    rows = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()[1:]]
    assert len(rows) == 10 and {json.loads(row["cell"])[0] for row in rows} == {256}
    assert {row["total_tokens"] for row in rows} == {3 * (64 + 256) + 6 * n for n in (1, 8)}


def test_the_demo_model_answers_tasks_and_loses_them_with_their_kvs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "--requests 8 --contexts 256 --new-tokens 24 --compressions 1,32 --kv-floor 9 --kv-seqs 8"
    full, whole, _ = run(tmp_path, *typed.split())["rows"]
    assert full["accuracy"] > 0.7 > whole["accuracy"] + 0.2
    assert "score in per cent of the full cache's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--contexts 64,x", "argument --contexts: invalid int list value: '64,x'"),
        ("--contexts 4", "--contexts must be at least 16, got 4"),
        ("--compressions 0.5", "--compressions must be at least 1, got 0.5"),
        ("--requests 0", "--requests must be at least 1, got 0"),
        ("--new-tokens 1", "--new-tokens must be at least 2, got 1"),
        ("--whole kv-compres", "--whole: invalid choice: 'kv-compres'"),
        ("--whole winnow --p-and-d winnow", "--whole and --p-and-d must be two presets"),
        ("--task rular", "task must be one of"),
        ("--task needle --categories single", "categories must be of depth-0"),
        ("--threads 0", "threads must be at least 1, got 0"),
        ("--model nowhere", "model must be a directory"),
        ("--model {model} --random-model", "--random-model and --model both name a model, give one"),
        ("--contexts 9000", "max_model_len must be at most 4096, the model's max_position_embeddings"),
        ("--eviction h2o", "--eviction"),
        ("--json /dev/null/x", "cannot write /dev/null/x"),
        ("--journal {junk}", "no journal of a study"),
    ],
)
def test_what_is_unusable_is_one_line(
    typed: str, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junk = tmp_path / "junk.json"
    junk.write_text("[]")
    words = typed.format(model=model, junk=junk).split()
    assert main(["kv-compress", *WORK.split(), *words]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 and message in shown[0]


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["kv-compress", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:\n  python -m winnow_lab.papers kv-compress" in shown and "--kv-floor" in shown
    assert "--kv-memory" not in shown
