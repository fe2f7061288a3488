"""Reading the input line by line."""

from pathlib import Path

import pytest

from winnow.batch import reader
from winnow.batch.reader import InputFile, RawLine, read_lines
from winnow.errors import UsageError


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n{}\r\n  \t\n[1]")
    assert list(read_lines(path)) == [RawLine(0, 2, b"{}\r\n"), RawLine(1, 4, b"[1]")]
    assert InputFile.scan(path).num_requests == 2


@pytest.mark.parametrize("size", [9, 10, 11, 25])
def test_a_line_that_is_too_long_is_passed_over(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 8)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"1234567\n" + b"x" * size + b"\nend\n")
    assert list(read_lines(path)) == [
        RawLine(0, 1, b"1234567\n"),
        RawLine(1, 2, None),
        RawLine(2, 3, b"end\n"),
    ]


def test_the_last_line_may_be_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 8)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 100)
    assert list(read_lines(path)) == [RawLine(0, 1, None)]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the prompts .*nowhere\.jsonl: No such file"):
        InputFile.scan(tmp_path / "nowhere.jsonl")
    with pytest.raises(UsageError, match="Is a directory"):
        InputFile.scan(tmp_path)


def test_another_content_is_another_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    before = InputFile.scan(path)
    path.write_text("[]\n")
    assert InputFile.scan(path).sha256 != before.sha256
