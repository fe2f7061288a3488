"""Texts to learn from: those that ship, and the user's files."""

import json
import re
from pathlib import Path

import pytest

from winnow.errors import DatasetError
from winnow_lab.fitting.texts import cut, read_texts, require_texts, shipped_texts


class Words:
    """A tokenizer whose tokens are words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[str]:
        return text.split()

    def decode(self, ids: list[str]) -> str:
        return " ".join(ids)


def test_shipped_texts_are_long_varied_and_the_same_for_a_seed() -> None:
    texts = shipped_texts(8, 512, seed=1)
    assert texts == shipped_texts(8, 512, seed=1) != shipped_texts(8, 512, seed=2)
    assert len(set(texts)) == 8
    assert all(len(text) >= 8 * 512 for text in texts)
    # Facts are hidden in all of them; some texts happen to get values of words alone.
    assert sum(re.search(r"\d{3}|[A-Z0-9]{5}|[0-9a-f]{8}-", text) is not None for text in texts) >= 6


def test_shipped_texts_do_not_speak_as_the_evaluations_do() -> None:
    assert not any(
        re.search("special magic|The grass is green", text) for text in shipped_texts(8, 512, seed=1)
    )


def test_files_are_texts_or_lines_of_them(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one text\nof two lines\n")
    lines.write_text("".join(json.dumps(each) + "\n" for each in ({"text": "second"}, {"prompt": "third"})))
    assert read_texts([plain, lines]) == ["one text\nof two lines\n", "second", "third"]
    lines.write_text('{"text": "fine"}\n{"other": 1}\n')
    with pytest.raises(DatasetError, match="line 2: field 'text' is missing"):
        read_texts([lines])


def test_pieces_come_from_all_texts_in_turns() -> None:
    texts = [" ".join(f"{name}{i}" for i in range(10)) for name in "ab"]
    assert cut(Words(), texts, tokens=4, most=3) == ["a0 a1 a2 a3", "b0 b1 b2 b3", "a4 a5 a6 a7"]
    assert cut(Words(), ["only this"], tokens=100, most=3) == ["only this"]


def test_too_little_text_is_refused() -> None:
    with pytest.raises(DatasetError, match=r"report\.txt: there must be at least 2 pieces of text.* got 1"):
        require_texts(["one"], [Path("report.txt")], 2)
