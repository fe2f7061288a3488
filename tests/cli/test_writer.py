"""The output file holds every result once, in order, wherever the writing process was killed."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, strategies as st

from winnow.batch import writer as writer_module
from winnow.batch.journal import Checkpoint, journal_path, read_checkpoint
from winnow.batch.writer import ResultWriter
from winnow.errors import UsageError

IDENTITY = {"input": "abc", "temperature": 0.5}


def line(index: int) -> bytes:
    """A record of its own length and with letters of more than one byte."""
    return json.dumps({"index": index, "text": "é\n" * (index % 5)}, ensure_ascii=False).encode() + b"\n"


def resume(output: Path) -> tuple[Checkpoint, list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    return read_checkpoint(output, IDENTITY, records.append), records


def finish(output: Path, order: list[int]) -> list[int]:
    """Resume and put what is missing; returns what was missing."""
    checkpoint, records = resume(output)
    missing = []
    with ResultWriter(output, IDENTITY, checkpoint) as writer:
        for index in order:
            if not writer.holds(index):
                missing.append(index)
                writer.put(index, line(index))
    assert len(records) == len(order) - len(missing)
    return missing


@given(order=st.permutations(range(12)))
def test_any_order_of_results_gives_the_order_of_the_input(order: list[int]) -> None:
    with TemporaryDirectory() as directory:
        output = Path(directory) / "out.jsonl"
        finish(output, order)
        assert output.read_bytes() == b"".join(map(line, range(12)))
        assert finish(output, order) == []


@given(order=st.permutations(range(10)), puts=st.integers(0, 10), torn=st.integers(0, 200), data=st.data())
def test_a_kill_in_the_midst_of_a_write_loses_only_that_write(
    order: list[int], puts: int, torn: int, data: st.DataObject
) -> None:
    with TemporaryDirectory() as directory:
        output = Path(directory) / "out.jsonl"
        before = _files_after(output, order[:puts])
        after = _files_after(output, order[: puts + 1])
        for path, text in before.items():
            # What the last put appended arrived up to an arbitrary byte.
            kept = after[path][: len(text) + torn] if after[path].startswith(text) else text
            path.write_bytes(kept)
        again = data.draw(st.permutations(range(10)))
        missing = finish(output, again)
        assert not set(missing) & set(order[:puts])
        assert output.read_bytes() == b"".join(map(line, range(10)))


@given(order=st.permutations(range(8)), puts=st.integers(0, 8), data=st.data())
def test_files_cut_at_any_byte_are_repaired(order: list[int], puts: int, data: st.DataObject) -> None:
    with TemporaryDirectory() as directory:
        output = Path(directory) / "out.jsonl"
        files = _files_after(output, order[:puts])
        header = files[journal_path(output)].index(b"\n") + 1
        for path, text in files.items():
            low = header if path != output else 0
            path.write_bytes(text[: data.draw(st.integers(low, len(text)))])
        finish(output, order)
        assert output.read_bytes() == b"".join(map(line, range(8)))


@given(order=st.permutations(range(9)), kills=st.lists(st.integers(0, 3), max_size=6))
def test_many_kills_in_a_row(order: list[int], kills: list[int]) -> None:
    with TemporaryDirectory() as directory:
        output = Path(directory) / "out.jsonl"
        answered: list[int] = []
        for puts in [*kills, 9]:
            checkpoint, _ = resume(output)
            writer = ResultWriter(output, IDENTITY, checkpoint)
            todo = [index for index in order if not writer.holds(index)][:puts]
            for index in todo:
                writer.put(index, line(index))
            answered += todo
            _drop(writer)
        assert sorted(answered) == list(range(9))
        assert output.read_bytes() == b"".join(map(line, range(9)))


def test_the_journal_is_emptied_when_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "JOURNAL_BYTES", 100)
    output = tmp_path / "out.jsonl"
    with ResultWriter(output, IDENTITY, Checkpoint()) as writer:
        header = journal_path(output).stat().st_size
        for index in [*range(1, 10), 0]:
            writer.put(index, line(index))
        assert journal_path(output).stat().st_size == header
        writer.put(11, line(11))
        assert journal_path(output).stat().st_size > header


def test_a_result_is_on_disk_before_put_returns(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with ResultWriter(output, IDENTITY, Checkpoint()) as writer:
        writer.put(0, line(0))
        assert output.read_bytes() == line(0)
        writer.put(2, line(2))
        assert journal_path(output).read_bytes().endswith(b"2\t" + line(2))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with (
        ResultWriter(output, IDENTITY, Checkpoint()),
        pytest.raises(UsageError, match="another run is writing"),
    ):
        ResultWriter(output, IDENTITY, None)


def test_an_output_that_changed_since_it_was_read_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(line(0))
    with pytest.raises(UsageError, match="was changed"):
        ResultWriter(output, IDENTITY, Checkpoint())
    assert output.read_bytes() == line(0)


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    finish(output, [0])
    with pytest.raises(UsageError, match=r"temperature was 0\.5 and is 0\.7.*--overwrite"):
        read_checkpoint(output, {**IDENTITY, "temperature": 0.7}, lambda record: None)
    with pytest.raises(UsageError, match="the prompts have changed"):
        read_checkpoint(output, {**IDENTITY, "input": "other"}, lambda record: None)


def test_a_file_that_no_run_wrote_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("my notes\n")
    with pytest.raises(UsageError, match="no unfinished run left it"):
        resume(output)
    journal_path(output).write_text("my other notes\n")
    with pytest.raises(UsageError, match="is not the journal of a run"):
        resume(output)


def test_starting_afresh_drops_what_was_there(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    finish(output, [0, 1, 2])
    with ResultWriter(output, {"input": "new"}, None) as writer:
        writer.put(0, line(7))
    assert output.read_bytes() == line(7)
    assert b'"new"' in journal_path(output).read_bytes()


def _files_after(output: Path, order: list[int]) -> dict[Path, bytes]:
    """Both files as a process leaves them that is killed after putting `order`."""
    for path in (output, journal_path(output)):
        path.unlink(missing_ok=True)
    writer = ResultWriter(output, IDENTITY, Checkpoint())
    for index in order:
        writer.put(index, line(index))
    files = {path: path.read_bytes() for path in (output, journal_path(output))}
    _drop(writer)
    return files


def _drop(writer: ResultWriter) -> None:
    """Let go of the files without the care of `close`."""
    writer._output.close()
    writer._journal.close()
