"""Sentences and words of texts, and what a share of a sentence's largest score keeps."""

from pathlib import Path

import pytest
from dense_model import WORDS
from lockstep import build, open_llm

from winnow import SamplingParams
from winnow.errors import ConfigError
from winnow.eviction import AdaptiveRows, BySentence, EvictionPolicy, Keep, KeyNorm, When, Window
from winnow.eviction.text_units import LONGEST_SENTENCE, TextMarks


def split(pieces: list[str], unit: str = "sentence") -> list[str]:
    """Return the texts of the units of a text whose tokens are `pieces`."""
    found: dict[int, str] = {}
    vocabulary = sorted(set(pieces))
    marks = TextMarks(lambda token: vocabulary[token], len(vocabulary))
    numbers = getattr(marks.units([vocabulary.index(piece) for piece in pieces]), unit).tolist()
    assert numbers == sorted(numbers) and set(numbers) == set(range(len(set(numbers))))
    for number, piece in zip(numbers, pieces, strict=True):
        found[number] = found.get(number, "") + piece
    return list(found.values())


@pytest.mark.parametrize(
    ("pieces", "sentences"),
    [
        (["It", " is", " 3", ".", "14", ".", " So", "?", " Yes"], ["It is 3.14.", " So?", " Yes"]),
        (["He", " said", ' "', "no", ".", '"', " Then", "."], ['He said "no."', " Then."]),
        (["x", " =", " self", ".", "y", "\n", "return", " x"], ["x = self.y\n", "return x"]),
        (["a", ";", " b", "…", " c"], ["a;", " b…", " c"]),
        (["今天", "很", "好", "。", "再见", "！"], ["今天很好。", "再见！"]),  # noqa: RUF001
        (["| 1", " |", " 2", " |\n", "| 3", " |"], ["| 1 | 2 |\n", "| 3 |"]),
        (["end", ".\n\n", "New"], ["end.\n\n", "New"]),
        (["no", " marks"], ["no marks"]),
    ],
)
def test_sentences(pieces: list[str], sentences: list[str]) -> None:
    assert split(pieces) == sentences


def test_what_no_mark_ends_is_cut() -> None:
    pieces = ["a"] + [" b"] * 2 * LONGEST_SENTENCE
    assert [text.count("b") + text.count("a") for text in split(pieces)] == [
        LONGEST_SENTENCE,
        LONGEST_SENTENCE,
        1,
    ]


def test_words() -> None:
    pieces = ["The", " num", "ber", " is", " d", "3", "-", "ab", "12", ".", " 今", "天"]
    assert split(pieces, "word") == ["The", " number", " is", " d3", "-", "ab12", ".", " 今", "天"]


def test_tokens_that_are_not_known_mark_nothing() -> None:
    marks = TextMarks(lambda token: [".", " a"][token], 2)
    assert marks.units([1, 0, -1, 7, 1]).sentence.tolist() == [0, 0, 0, 0, 0]
    assert marks.units([1, 0, 1]).sentence.tolist() == [0, 0, 1]
    assert marks.units([]).sentence.tolist() == []


def test_more_sentences_than_a_row_holds(tmp_path: Path) -> None:
    """A later round sees few KVs of many sentences, and numbers them as the first one did."""
    build(tmp_path, seed=1)
    stop, words = WORDS.index("."), range(6, 66)
    prompt = [token for word in words for token in (word, stop)]
    policy = EvictionPolicy(
        BySentence(Window(4, continual=True)), AdaptiveRows(), Keep(recent=4), When(True, decode_every=4)
    )
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True, eviction=policy, kv_budget=16)
    with open_llm(tmp_path, seed=1) as llm:
        report = llm.generate(prompt, params)[0].outputs[0].eviction
        llm.check_integrity()
    assert report is not None and report.rounds > 2 and report.mean_kept < len(words) / 2


def test_what_cannot_be_shared_is_refused() -> None:
    for score, share, message in (
        (Window(), 0.0, "share must be above 0 and at most 1, got 0.0"),
        (KeyNorm(), 0.5, "KeyNorm pools, or may be below 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            BySentence(score, share)
