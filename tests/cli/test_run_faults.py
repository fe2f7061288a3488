"""`winnow run` where lines, paths, streams or the disk misbehave."""

import errno
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from forked import CLOSED, start

from winnow.batch.writer import ResultWriter
from winnow.cli.flags.paths import require_writable
from winnow.cli.main import main
from winnow.errors import UsageError
from winnow.outputs import CompletionOutput, RequestOutput

Write = Callable[[Iterable[Any]], Path]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llms: list[FakeLLM]) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def run(*words: str, model: Path) -> int:
    return main(["run", *words, "--model", str(model), "--progress", "off"])


# -- one line's fault ------------------------------------------------------------------------------------------------


def test_a_fault_at_submission_is_one_record(
    here: Path, write_prompts: Write, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_all = FakeLLM.submit_all

    def faulty(self: FakeLLM, requests: Any) -> None:
        if requests[0].prompt.text == "bad":
            raise OverflowError("int too big to convert")
        submit_all(self, requests)

    monkeypatch.setattr(FakeLLM, "submit_all", faulty)
    write_prompts([{"prompt": "ab"}, {"prompt": "bad", "custom_id": "x"}, {"prompt": "cd"}])
    assert run("prompts.jsonl", "-o", "out", model=model_dir) == 1
    shown = records(here / "out")
    assert [record.get("text") for record in shown] == ["ba", None, "dc"]
    message = "OverflowError: int too big to convert"
    assert shown[1]["error"] == {"line": 2, "code": "internal_error", "message": message}
    assert shown[1]["custom_id"] == "x"


def fail_in_step(monkeypatch: pytest.MonkeyPatch, is_faulty: Callable[[list[int]], bool]) -> None:
    step = FakeLLM.step

    def faulty(self: FakeLLM) -> list[RequestOutput]:
        if any(map(is_faulty, self._waiting.values())):
            raise IndexError("out of range")
        return step(self)

    monkeypatch.setattr(FakeLLM, "step", faulty)


def test_a_fault_in_a_step_is_the_record_of_the_line_that_brings_it(
    here: Path, write_prompts: Write, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_step(monkeypatch, lambda tokens: tokens[0] == ord("x"))
    write_prompts({"prompt": "xa" if index == 3 else f"ab{index}"} for index in range(9))
    assert run("prompts.jsonl", "-o", "out", model=model_dir) == 1
    assert [index for index, record in enumerate(records(here / "out")) if "error" in record] == [3]


def test_an_engine_that_fails_for_all_ends_the_run(
    here: Path, write_prompts: Write, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_step(monkeypatch, lambda tokens: True)
    write_prompts({"prompt": f"ab{index}"} for index in range(5))
    with pytest.raises(IndexError):
        run("prompts.jsonl", "-o", "out", model=model_dir)
    assert (here / "out").read_bytes() == b""


def test_a_fault_while_finishing_is_one_record(
    here: Path, write_prompts: Write, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = FakeLLM._output

    def faulty(self: FakeLLM, name: str, *more: Any) -> RequestOutput:
        shown = output(self, name, *more)
        if name == "line-2":
            shown.outputs = [CompletionOutput(0, "\udcff", [1], finish_reason="stop")]
        return shown

    monkeypatch.setattr(FakeLLM, "_output", faulty)
    write_prompts({"prompt": f"ab{index}"} for index in range(3))
    assert run("prompts.jsonl", "-o", "out", model=model_dir) == 1
    assert [record.get("error", {}).get("code") for record in records(here / "out")] == [
        None,
        "internal_error",
        None,
    ]


# -- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "P -o OUT --summary P",
        "P -o OUT --summary OUT",
        "P -o OUT --summary ./OUT",
        "P -o OUT --summary OUT.journal",
        "P -o HARD",
        "SOFT -o OUT --summary HARD",
        "P -o SOFT",
        "P -o DANGLING --summary NEW",
        "J.journal -o J",
        "J.journal.new -o J",
    ],
)
def test_no_path_is_written_over_by_another(
    words: str, here: Path, model_dir: Path, llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("P", "J.journal", "J.journal.new"):
        (here / name).write_text('{"prompt": "ab"}\n')
    os.link("P", "HARD")
    os.symlink("P", "SOFT")
    os.symlink("NEW", "DANGLING")
    before = {path.name: path.read_bytes() for path in here.iterdir() if path.is_file()}
    assert run(*words.split(), "--overwrite", model=model_dir) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("winnow: error: ")
    assert shown.count("\n") == 1
    assert {path.name: path.read_bytes() for path in here.iterdir() if path.is_file()} == before
    assert llms == []


def test_links_to_files_that_are_not_there_yet_are_followed(
    here: Path, write_prompts: Write, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = here / "disk"
    disk.mkdir()
    names = ("out", "out.journal", "s.json")
    for name in names:
        (here / name).symlink_to(disk / name)
    write_prompts([{"prompt": "ab"}])
    assert run("prompts.jsonl", "-o", "missing/out", "--summary", "s.json", model=model_dir) == 0
    assert run("prompts.jsonl", "-o", "out", "--summary", "s.json", model=model_dir) == 0
    assert all((here / name).is_symlink() for name in names)
    assert [record["text"] for record in records(disk / "out")] == ["ba"]
    assert json.loads((disk / "s.json").read_text())["requests"] == 1
    assert (disk / "out.journal").stat().st_size > 0
    # A disk that is not mounted is not replaced by a directory of that name.
    (here / "away").symlink_to(here / "unmounted" / "out")
    assert run("prompts.jsonl", "-o", "away", model=model_dir) == 2
    assert "cannot write away: No such file or directory" in capsys.readouterr().err
    assert (here / "away").is_symlink() and not (here / "unmounted").exists()


def test_a_path_that_was_only_looked_at_leaves_nothing(here: Path) -> None:
    (here / "link").symlink_to(here / "target")
    (here / "loop").symlink_to(here / "loop")
    for name in ("plain", "link"):
        require_writable(here / name, name)
    assert sorted(path.name for path in here.iterdir()) == ["link", "loop"]
    with pytest.raises(UsageError, match="cannot write loop"):
        require_writable(here / "loop", "loop")


def test_standard_output_may_not_go_into_the_answers(here: Path, write_prompts: Write) -> None:
    write_prompts([{"prompt": "ab"}])
    with (here / "out").open("wb") as out:
        command = [sys.executable, "-m", "winnow", "run", "prompts.jsonl", "-o", "out"]
        process = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
    assert process.returncode == 2
    assert "OUT.jsonl must not be where standard output goes" in process.stderr


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_pipe_is_read_once_and_can_be_resumed(here: Path, model_dir: Path, llms: list[FakeLLM]) -> None:
    os.mkfifo("pipe")
    for _ in range(2):
        feed = threading.Thread(target=(here / "pipe").write_text, args=('{"prompt": "ab"}\n' * 3,))
        feed.start()
        assert run("pipe", "-o", "out", model=model_dir) == 0
        feed.join()
    assert [record["text"] for record in records(here / "out")] == ["ba"] * 3
    assert len(llms) == 1, "the second time nothing was left to do"


def test_standard_streams(
    here: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    data = "".join(json.dumps({"prompt": f"ab{index}"}) + "\n" for index in range(30)).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run("-", "-o", "-", model=model_dir) == 0
    shown = capfdbinary.readouterr()
    assert [json.loads(line)["index"] for line in shown.out.splitlines()] == list(range(30))
    assert b"requests" in shown.err
    assert list(here.iterdir()) == [model_dir] if model_dir.parent == here else not list(here.iterdir())


def test_a_directory_is_no_stream(here: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "d").mkdir()
    assert run("d", "-o", "out", model=model_dir) == 2
    assert "cannot read the prompts d: Is a directory" in capsys.readouterr().err
    assert not (here / "out").exists()


def test_a_mark_and_line_ends_of_other_systems(here: Path, model_dir: Path) -> None:
    text = '\ufeff\r\n{"prompt": "ab"}\r\n\r\n\ufeff{"prompt": "cd"}\r\n'
    (here / "prompts.jsonl").write_bytes(text.encode())
    assert run("prompts.jsonl", "-o", "out", model=model_dir) == 0
    assert [record["text"] for record in records(here / "out")] == ["ba", "dc"]


def test_equal_custom_ids_are_told(
    here: Path, write_prompts: Write, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts([{"prompt": "ab", "custom_id": name} for name in "xyx"] + [{"prompt": "ab"}])
    assert run("prompts.jsonl", "-o", "out", model=model_dir) == 0
    assert capsys.readouterr().err == "winnow: warning: lines 1 and 3 have the same custom_id 'x'\n"


# -- the machine -----------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_is_one_line(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path / "out", {}, None)
    writer.put(0, b"{}\n")
    full = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115 (the writer closes it)
    with pytest.raises(UsageError, match=r"cannot write .*out: No space left on device$"), writer:
        writer._output.close()
        writer._output = full
        writer.put(1, b"{}\n")
    assert (tmp_path / "out").read_bytes() == b"{}\n"


def test_a_disk_that_fills_says_how_to_resume(
    here: Path,
    write_prompts: Write,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(self: ResultWriter) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_prompts([{"prompt": "ab"}])
    monkeypatch.setattr(sys, "argv", ["winnow", "run", "prompts.jsonl", "-o", "out", "--overwrite"])
    with monkeypatch.context() as patch:
        patch.setattr(ResultWriter, "sync", full)
        assert run("prompts.jsonl", "-o", "out", "--overwrite", model=model_dir) == 2
    assert capsys.readouterr().err == (
        "winnow: error: cannot write out: No space left on device "
        "(finished answers are safe; resume with: winnow run prompts.jsonl -o out)\n"
    )


@pytest.mark.parametrize(
    ("closed", "code", "message"),
    [(True, 2, "winnow: error: cannot write to standard output: it is closed\n"), (False, 0, "")],
    ids=["winnow run >&-", "winnow run | true"],
)
def test_a_table_that_is_not_taken(
    closed: bool,
    code: int,
    message: str,
    here: Path,
    write_prompts: Write,
    command_env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(here)
    write_prompts([{"prompt": "ab", "max_tokens": 1}])
    read, write = os.pipe()
    os.close(read)
    words = ["run", "prompts.jsonl", "-o", "out", "--temperature", "0", "--progress", "off"]
    with (here / "err").open("wb") as err:
        process = start(words, command_env, CLOSED if closed else write, err.fileno())
        process.join()
    os.close(write)
    assert (process.exitcode, (here / "err").read_text()) == (code, message)
    assert len(records(here / "out")) == 1


def test_a_category_may_look_like_markup(
    here: Path, write_prompts: Write, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["[/INST]", "[bold]", ":smile:"]
    write_prompts({"prompt": "ab", "reference": "ba", "category": name} for name in names)
    assert run("prompts.jsonl", "-o", "out", "--summary", "s.json", model=model_dir) == 0
    table = capsys.readouterr().out
    assert all(f"accuracy: {name} (1)" in table for name in names)
    assert {each["category"] for each in json.loads((here / "s.json").read_text())["accuracy"]} > set(names)
