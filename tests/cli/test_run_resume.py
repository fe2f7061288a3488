"""What `winnow run` may resume, and what it must not."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from options import NAMES, as_flags, base_options, other_value

from winnow.batch.journal import journal_path
from winnow.cli.main import main
from winnow.config import EFFECTS, Effect

Run = Callable[..., int]
Write = Callable[[Iterable[Any]], Path]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def run(model_dir: Path, output: Path, tmp_path: Path, llms: list[FakeLLM]) -> Run:
    def command(*more: str) -> int:
        prompts = str(tmp_path / "prompts.jsonl")
        return main(["run", prompts, "-o", str(output), "--model", str(model_dir), *more])

    return command


@pytest.mark.parametrize(
    ("part", "name"), [each for each in NAMES if each[1] not in ("model", "revision", "lora")]
)
def test_every_option_counts(
    part: str, name: str, run: Run, write_prompts: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts([{"prompt": "ab"}])
    base = [word for item in base_options(part, name).items() for word in as_flags(*item)]
    assert run(*base, "--temperature", "0") == 0
    capsys.readouterr()
    code = run(*base, "--temperature", "0", *as_flags(name, other_value(part, name)))
    shown = capsys.readouterr().err
    assert f"{name} was " in shown
    if EFFECTS[name] is Effect.ALWAYS:
        assert (code, shown.startswith("winnow: error: ")) == (2, True)
    else:
        assert (code, "which change no answer" in shown) == (0, True)


@pytest.mark.parametrize(
    ("base", "name", "code"),
    [
        ([], "max_num_seqs", 2),
        (["--temperature", "0"], "max_num_seqs", 0),
        ([], "kv_memory", 0),
        (["--eviction", "kv-compress"], "kv_memory", 2),
        (["--eviction", "snapkv"], "kv_memory", 0),
    ],
)
def test_what_changes_answers_depends_on_sampling_and_pressure(
    base: list[str], name: str, code: int, run: Run, write_prompts: Write
) -> None:
    write_prompts([{"prompt": "ab"}])
    assert run(*base) == 0
    part = {"max_num_seqs": "scheduler", "kv_memory": "cache"}[name]
    assert run(*base, *as_flags(name, other_value(part, name))) == code


def test_a_journal_of_an_older_version(
    run: Run, write_prompts: Write, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts([{"prompt": "ab"}])
    assert run() == 0
    header = json.loads(journal_path(output).read_bytes())
    for name in ("eviction", "compression", "kv_budget", "kv_floor", "input_bytes"):
        del header["fingerprint"][name]
    # Parameters of requests, which had these names.
    header["fingerprint"] |= {"eviction": None, "compression": None, "detokenize": True, "protect": []}
    journal_path(output).write_text(json.dumps(header) + "\n")
    assert run("--eviction", "snapkv") == 2
    assert "eviction was not recorded and is 'snapkv'" in capsys.readouterr().err
    assert run() == 0
    assert "kv_floor was not recorded and is 128" in capsys.readouterr().err


def test_lines_that_were_added_are_answered(
    run: Run, write_prompts: Write, output: Path, llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts({"prompt": f"prompt {index}"} for index in range(4))
    assert run() == 0
    first = output.read_bytes()
    for more in ("x", "y"):
        with prompts.open("a") as file:
            file.write(json.dumps({"prompt": more}) + "\n")
        assert run() == 0
    assert output.read_bytes().startswith(first)
    assert [json.loads(line)["index"] for line in output.read_bytes().splitlines()] == list(range(6))
    assert [len(llm.submitted) for llm in llms] == [4, 1, 1]
    lines = prompts.read_text().splitlines(keepends=True)
    prompts.write_text("".join([*lines[:4], lines[5], *lines[4:]]))
    assert run() == 2, "a line that was added before is another one now"
    assert "the prompts have changed" in capsys.readouterr().err


def test_a_grown_input_keeps_what_was_early(
    run: Run, write_prompts: Write, output: Path, llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts({"prompt": f"prompt {index}"} for index in range(20))
    monkeypatch.setattr(FakeLLM, "interrupted_after", 7)
    assert run() == 130
    assert len(output.read_bytes().splitlines()) < 7
    monkeypatch.setattr(FakeLLM, "interrupted_after", None)
    with prompts.open("a") as file:
        file.write('{"prompt": "x"}\n')
    assert run() == 0
    assert len(llms[1].submitted) == 14
    assert [json.loads(line)["index"] for line in output.read_bytes().splitlines()] == list(range(21))


def test_a_last_line_that_goes_on_is_another_question(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}')
    assert run() == 0
    prompts.write_text('{"prompt": "a"} \n{"prompt": "b"}\n')
    assert run() == 2
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert run() == 0
