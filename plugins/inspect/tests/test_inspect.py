"""`winnow inspect`: what it writes and says with the demo model, and what it refuses before one is loaded."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from winnow.cli.main import main

PROMPT = "The favourite season of Andrew is late summer. " * 6 + "The favourite season of Andrew is"
FLAGS = [
    "--eviction",
    "snapkv",
    "--kv-budget",
    "40",
    "--kv-memory",
    "32MiB",
    "--max-tokens",
    "3",
    "--ignore-eos",
]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Mistakes are found before a model is loaded, in a directory where nothing may appear."""

    def refuse(options: dict[str, Any]) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr("winnow.cli.flags.engine.open_llm", refuse)
    monkeypatch.chdir(tmp_path)


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["inspect", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:\n  winnow inspect --file" in shown
    assert "--prompt-logprobs" not in shown


def test_page_json_and_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompt.txt").write_text(PROMPT + "\n")
    assert main(["inspect", "--file", "prompt.txt", "--json", "out/kept.json", *FLAGS]) == 0
    shown = json.loads(Path("out/kept.json").read_text())
    assert "".join(token["text"] for token in shown["tokens"]).startswith("<s>" + PROMPT)
    assert shown["num_prompt_tokens"] + 3 == len(shown["tokens"])
    assert {len(row) for layer in shown["after_prompt"]["rows"] for row in layer} == {40}
    page = Path("inspect.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("summer") == 6 + shown["answer"].count("summer")
    summary = " ".join(capsys.readouterr().out.split())
    assert "snapkv" in summary
    assert f"{shown['num_prompt_tokens']} tokens" in summary
    assert json.dumps(shown["answer"]) in summary
    assert "5 40 40 42 42" in summary, "the last layer's heads after the prompt and at the end"
    assert "written: inspect.html written: out/kept.json" in summary


def test_standard_input_and_a_page_of_another_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("añ\n".encode())))
    page = tmp_path / "deep" / ("page" * 20 + ".html")
    assert main(["inspect", "-", "-o", str(page), "--kv-memory", "32MiB", "--max-tokens", "2"]) == 0
    assert f"written: {page}\n" in capsys.readouterr().out, "a path in one piece"
    assert "ñ" in page.read_text()


USAGE_ERRORS = [
    ("", "give the prompt either as PROMPT or by --file"),
    ("x --file y", "give the prompt either as PROMPT or by --file"),
    ("--file nowhere.txt", "cannot read --file nowhere.txt: No such file or directory"),
    ("--file .", "cannot read --file .: Is a directory"),
    ("--file EMPTY", "must not be empty"),
    ("--file LATIN1", "must be UTF-8 text"),
    ("x -o .", "cannot write .: it is no regular file"),
    ("x -o /dev/null/page.html", "cannot write /dev/null/page.html: "),
    ("x -o same --json same", "--output and --json must not be the same file"),
    ("--file TEXT -o TEXT", "--output must not be --file"),
    ("x --eviction", "argument --eviction: expected one argument"),
    ("x --temperature -1", "temperature must be at least 0"),
    ("x --kv-memry 1", "unknown argument '--kv-memry'; did you mean --kv-memory?"),
    ("x --n 2", "unknown argument '--n'"),
]


@pytest.mark.parametrize(("typed", "message"), USAGE_ERRORS)
def test_what_is_unusable_is_one_line_and_exit_code_2(
    typed: str, message: str, no_model: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = {"EMPTY": b"\n", "LATIN1": "é".encode("latin-1"), "TEXT": b"a"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert main(["inspect", *typed.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("winnow: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert {path.name for path in tmp_path.iterdir()} == set(files), "something was left behind"
    assert (tmp_path / "TEXT").read_bytes() == b"a"


def test_what_the_engine_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["inspect", PROMPT * 5, "--eviction", "snapkw", "--kv-budget", "300", "--kv-memory", "32MiB"]
    assert main(command) == 2
    assert "eviction must be one of" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
