"""`winnow run` from file to file, over an engine without a model."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM

from winnow.batch.driver import line_seed
from winnow.batch.journal import encode_entry, journal_path
from winnow.cli.main import main

Run = Callable[..., int]
Write = Callable[[Iterable[Any]], Path]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "out.jsonl"


@pytest.fixture
def run(model_dir: Path, output: Path, tmp_path: Path, llms: list[FakeLLM]) -> Run:
    """Run over prompts.jsonl; the exit code."""

    def command(*more: str) -> int:
        prompts = str(tmp_path / "prompts.jsonl")
        return main(["run", prompts, "-o", str(output), "--model", str(model_dir), *more])

    return command


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_answers_come_in_the_order_of_the_input(run: Run, write_prompts: Write, output: Path) -> None:
    texts = [f"prompt {index}" for index in range(30)]
    write_prompts({"prompt": text} for text in texts)
    assert run() == 0
    assert [record["text"] for record in records(output)] == [text[::-1] for text in texts]
    assert [record["index"] for record in records(output)] == list(range(30))


def test_lines_run_on_accounts(run: Run, write_prompts: Write, output: Path, llms: list[FakeLLM]) -> None:
    write_prompts(
        [
            {"prompt": "ab", "tenant": "gold", "priority": 2},
            {"messages": [{"role": "user", "content": "cd"}], "tenant": "lead"},
            {"prompt": "ef"},
            {"prompt": "gh", "tenant": []},
        ]
    )
    assert run() == 1
    assert list(llms[0].accounts.values()) == [("gold", 2), ("lead", 0), (None, 0)]
    assert records(output)[3]["error"]["code"] == "invalid_request"


def test_one_bad_line_is_one_error_record(
    run: Run, write_prompts: Write, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts(
        ["", {"prompt": "ab"}, "{nope", {"prompt": "x" * 999, "id": 9}, {"prompt": "huge"}, {"prompt": "cd"}]
    )
    assert run() == 1
    shown = records(output)
    assert [record.get("text") for record in shown] == ["ba", None, None, None, "dc"]
    assert [record["error"]["line"] for record in shown[1:4]] == [3, 4, 5]
    codes = [record["error"]["code"] for record in shown[1:4]]
    assert codes == ["invalid_json", "context_length_exceeded", "kv_memory_exceeded"]
    assert shown[2]["id"] == 9
    assert re.search(
        r"winnow: 3 of 5 lines failed; the first, line 3: .*JSON.*; see the error records",
        capsys.readouterr().err,
    )


def test_if_every_line_failed_the_run_failed(
    run: Run, write_prompts: Write, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts([{"prompt": ""}, "nope"])
    assert run() == 2
    assert "winnow: error: every line failed" in capsys.readouterr().err
    assert len(records(output)) == 2


def test_no_lines_no_answers(run: Run, write_prompts: Write, output: Path, llms: list[FakeLLM]) -> None:
    write_prompts([])
    assert run() == 0
    assert output.read_bytes() == b""
    assert llms == []


def test_an_interrupted_run_goes_on_where_it_was(
    run: Run, write_prompts: Write, output: Path, llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_prompts({"prompt": f"prompt {index}"} for index in range(20))
    monkeypatch.setattr(FakeLLM, "interrupted_after", 7)
    assert run() == 130
    assert len(output.read_bytes().splitlines()) < 7
    monkeypatch.setattr(FakeLLM, "interrupted_after", None)
    assert run() == 0
    assert [record["index"] for record in records(output)] == list(range(20))
    assert len(llms[1].submitted) == 13
    assert run() == 0
    assert len(llms) == 2, "a finished run needs no engine"


def test_a_kill_between_journal_and_output_is_repaired(
    run: Run, write_prompts: Write, output: Path, llms: list[FakeLLM]
) -> None:
    write_prompts({"prompt": f"prompt {index}"} for index in range(5))
    assert run() == 0
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    with journal_path(output).open("ab") as journal:
        for index in (3, 4):
            journal.write(encode_entry(index, lines[index]))
    output.write_bytes(b"".join(lines[:3]) + lines[3][:10])
    assert run() == 0
    assert output.read_bytes() == whole
    assert len(llms) == 1, "nothing had to be computed"


def test_a_resumed_run_samples_as_an_uninterrupted_one(
    run: Run, write_prompts: Write, llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_prompts([{"prompt": "a"}, {"prompt": "b", "seed": 5}, {"prompt": "c"}])
    assert run("--seed", "3") == 0
    seeds = [params.seed for params in llms[0].params.values()]
    assert seeds == [line_seed(3, 0), 5, line_seed(3, 2)]
    assert seeds[0] != seeds[2]


def test_other_settings_do_not_resume(
    run: Run, write_prompts: Write, output: Path, capsys: pytest.CaptureFixture[str], llms: list[FakeLLM]
) -> None:
    write_prompts([{"prompt": "ab"}])
    assert run() == 0
    before = output.read_bytes()
    capsys.readouterr()
    assert run("--temperature", "0.5", "--kv-memory", "1MiB") == 2
    shown = capsys.readouterr().err
    assert "kv_memory was 536870912 and is 1048576; temperature was None and is 0.5" in shown
    assert output.read_bytes() == before
    assert len(llms) == 1
    assert run("--temperature", "1") == 2, "the model may recommend another"
    assert run("--kv-memory", "512MiB") == 0, "a default that is typed out changes nothing"
    assert run("--temperature", "0.5", "--overwrite") == 0


def test_a_foreign_output_is_not_touched(
    run: Run, write_prompts: Write, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts([{"prompt": "ab"}])
    output.parent.mkdir()
    output.write_text("my notes\n")
    assert run() == 2
    assert "pass --overwrite to replace it" in capsys.readouterr().err
    assert output.read_text() == "my notes\n"
    assert run("--overwrite") == 0
    assert len(records(output)) == 1


def test_nothing_is_overwritten_for_an_engine_that_cannot_start(
    run: Run, write_prompts: Write, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from winnow.errors import ConfigError

    def fail(options: dict[str, Any], *, quiet: bool) -> FakeLLM:
        raise ConfigError("kv_memory must be at least 159.6 KiB, got 1.0 KiB")

    write_prompts([{"prompt": "ab"}])
    output.parent.mkdir()
    output.write_text("my notes\n")
    monkeypatch.setattr("winnow.cli.flags.engine.open_llm", fail)
    assert run("--overwrite") == 2
    assert output.read_text() == "my notes\n"
    assert not journal_path(output).exists()


def test_few_lines_are_read_ahead(run: Run, write_prompts: Write, llms: list[FakeLLM]) -> None:
    write_prompts({"prompt": f"prompt {index}"} for index in range(200))
    for words, most in ((), 64), (("--overwrite", "--scheduling-policy", "priority"), 8):
        assert run("--max-num-seqs", "4", *words) == 0
        assert llms[-1].most_waiting == most
        assert llms[-1].config.scheduler.scheduling_policy == (words[-1] if words else "prefix")


def test_early_results_do_not_pile_up(
    run: Run, write_prompts: Write, llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, output: Path
) -> None:
    monkeypatch.setattr("winnow.batch.driver.MAX_EARLY", 3)
    write_prompts({"prompt": f"prompt {index}"} for index in range(60))
    assert run("--max-num-seqs", "4") == 0
    assert len(records(output)) == 60


def test_the_summary_counts_all_lines_also_after_a_resume(
    run: Run,
    write_prompts: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[Any] = [
        {"prompt": "ab", "reference": "ba", "category": "right"},
        {"prompt": "cd", "reference": "cd", "category": "wrong"},
        {"prompt": "e f", "reference": "f g", "category": "half", "metric": "rouge-l"},
        {"prompt": "ef", "reference": "fe", "category": "wrong"},
        "nope",
    ]
    write_prompts(lines)
    whole, pieces = tmp_path / "whole.json", tmp_path / "pieces.json"
    assert run("--summary", str(whole)) == 1
    monkeypatch.setattr(FakeLLM, "interrupted_after", 2)
    assert run("--overwrite") == 130
    monkeypatch.setattr(FakeLLM, "interrupted_after", None)
    capsys.readouterr()
    assert run("--summary", str(pieces)) == 1
    table = capsys.readouterr().out
    one, two = json.loads(whole.read_text()), json.loads(pieces.read_text())
    accuracy = {entry["category"]: (entry["lines"], entry["score"]) for entry in one["accuracy"]}
    assert accuracy == {"right": (1, 1.0), "wrong": (2, 0.5), "half": (1, 0.5), "all": (4, 0.625)}
    for name in ("requests", "failed", "prompt_tokens", "generated_tokens", "accuracy"):
        assert one[name] == two[name]
    assert (one["resumed"], two["resumed"]) == (0, 3)
    assert (one["requests"], one["failed"], one["prompt_tokens"]) == (5, 1, 9)
    assert (one["kv_bytes_peak"], one["kv_bytes_budget"], one["preemptions"]) == (2048, 4096, 3)
    texts = ("requests", "from an earlier start", "2.0 KiB of 4.0 KiB", "accuracy: half (1)", "62.5%")
    for text in (*texts, "18 of 20", "lines 7, 31"):
        assert text in table


def test_a_rerun_of_a_finished_run_tells_the_same_scores(
    run: Run, write_prompts: Write, capsys: pytest.CaptureFixture[str], output: Path
) -> None:
    write_prompts([{"prompt": "ab", "reference": "ba"}])
    assert run() == 0
    before = output.read_bytes()
    capsys.readouterr()
    assert run() == 0
    assert "accuracy: all (1)" in capsys.readouterr().out
    assert output.read_bytes() == before


def test_plain_progress_goes_to_standard_error(
    run: Run, write_prompts: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnow.cli.screen.progress.PLAIN_SECONDS", 0.0)
    write_prompts([{"prompt": "ab"}, {"prompt": "cd"}])
    assert run("--progress", "plain") == 0
    memory, *lines = capsys.readouterr().err.splitlines()
    assert (
        memory
        == "winnow: memory: weights 3.0 MiB (bfloat16) + KVs up to 512.0 MiB + about 1.0 GiB for all else"
    )
    assert [line.split(" | ")[0] for line in lines] == [
        f"winnow: {done}/2 done, 0 failed" for done in range(3)
    ]
    assert run("--overwrite", "--progress", "off") == 0
    assert capsys.readouterr().err == ""


def test_how_tokens_are_sampled_is_said_where_a_line_leaves_it_out(
    run: Run, write_prompts: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fake_llm.FakeLLM.sampling_defaults", {})
    line = {"prompt": "ab", "temperature": 0}
    for lines, flags, said in (
        ([line], (), 0),
        ([line, {"prompt": "c"}], (), 1),
        ([{"prompt": "c"}], ("--temperature", "0"), 0),
    ):
        write_prompts(lines)
        assert run("--overwrite", *flags) == 0
        assert capsys.readouterr().err.count("recommends no sampling: temperature 0.3") == said


def test_a_metric_that_there_is_not_is_an_error_of_its_line(
    run: Run, write_prompts: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts([{"prompt": "a"}, {"prompt": "b", "reference": "c", "metric": "bleu"}])
    assert run() == 1
    assert (
        "line 2: metric must be one of exact, rouge-l, qa-f1, match-all, got 'bleu'"
        in capsys.readouterr().err
    )
