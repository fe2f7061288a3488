"""Reading tasks' files: what is wrong is named with its file and line."""

import gzip
import json
from pathlib import Path

import pytest

from winnow.errors import DatasetError
from winnow_lab.evaluate.tasks.files import find_file, read_json, read_json_lines, read_text


def write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_reads_lines_plain_and_packed(tmp_path, name):
    path = write(tmp_path / name, '{"q": "a\u2028b", "a": ["x", "y"]}\n\n{"q": "c", "a": ["z"]}\r\n')
    rows = list(read_json_lines(path))
    assert [row.text("q") for row in rows] == ["a\u2028b", "c"]
    assert [row.texts("a") for row in rows] == [("x", "y"), ("z",)]
    assert rows[1].place == f"{path}, line 3"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not valid JSON"),
        ("9" * 5000, "not valid JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[1]", "expected a JSON object, not a list"),
        ("null", "expected a JSON object, not null"),
        ("{}", "field 'q' is missing"),
        ('{"q": 3}', "'q' must be a string, not a number"),
        ('{"q": true}', "'q' must be a string, not a boolean"),
        ('{"q": "x", "a": "y"}', "'a' must be a list, not a string"),
        ('{"q": "x", "a": []}', "'a' must be a list of at least one string"),
        ('{"q": "x", "a": ["y", 1]}', "'a' must be a list of at least one string"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, reason):
    path = write(tmp_path / "rows.jsonl", '{"q": "x", "a": ["y"]}\n' + line)
    with pytest.raises(DatasetError, match=r"rows\.jsonl, line 2: ") as error:
        for row in read_json_lines(path):
            row.text("q"), row.texts("a")
    assert reason in str(error.value)


def test_records_within_records_know_their_place(tmp_path):
    path = write(tmp_path / "all.json", json.dumps({"data": [{"x": [{"y": "z"}]}, {"x": [{"y": "z"}, {}]}]}))
    with pytest.raises(DatasetError) as error:
        for entry in read_json(path).records("data"):
            for inner in entry.records("x"):
                inner.text("y")
    assert str(error.value) == f"{path}, 'data', entry 2, 'x', entry 2: field 'y' is missing"


def test_finds_packed_files_and_says_where_missing_ones_are_published(tmp_path):
    packed = write(tmp_path / "a.jsonl.gz", "{}")
    assert find_file(tmp_path, "a.jsonl", "by X") == packed
    plain = write(tmp_path / "a.jsonl", "{}")
    assert find_file(tmp_path, "a.jsonl", "by X") == plain
    with pytest.raises(
        DatasetError,
        match=r"--data: .* has no file b.jsonl \(or b.jsonl.gz\); it is published by the project X",
    ):
        find_file(tmp_path, "b.jsonl", "by the project X")


@pytest.mark.parametrize(
    "data",
    [b"\x1f\x8b\x08", b"no gzip", gzip.compress(b"x" * 999)[:-9], gzip.compress(b"\xff")],
    ids=["head", "other", "cut", "not UTF-8"],  # without the time that gzip writes down
)
def test_a_broken_file_is_named(tmp_path, data):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"rows.jsonl.gz cannot be read: "):
        read_text(path)


def test_a_file_of_another_system(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes('\ufeff{"a": "x"}\r\n{"a": "y"}\r\n'.encode())
    assert [row.text("a") for row in read_json_lines(tmp_path / "rows.jsonl")] == ["x", "y"]
    (tmp_path / "page.txt").write_bytes("\ufeffa\r\n-----\r\nb".encode())
    assert read_text(tmp_path / "page.txt") == "a\n-----\nb"
