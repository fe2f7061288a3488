"""Streamed text against the tokenizer's own decoding of all tokens at once."""

import random
from typing import Any

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st
from tokenizer_kinds import BYTE_LEVEL, CORPUS, SENTENCEPIECE, UNKNOWN
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from winnow.sampling import SamplingParams, TextStream


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def spell(text: str) -> list[int]:
    """One token per byte, so that text can be cut anywhere."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [BYTE_LEVEL.convert_tokens_to_ids(each) for each in alphabet.pre_tokenize_str(text)[0][0]]


def stream(
    tokenizer: Any, tokens: list[int], prompt: list[int] | None = None, **params: Any
) -> tuple[TextStream, list[str]]:
    """Push all, take a delta after each; checks that what was given out is never taken back."""
    text = TextStream(tokenizer, SamplingParams(**params), prompt or [])
    deltas = []
    for token in tokens:
        text.push(token)
        deltas.append(text.take_delta())
        assert text.text == "".join(deltas)
    text.finish()
    text.finish()  # a second call changes nothing
    deltas.append(text.take_delta())
    assert text.text == "".join(deltas) and text.take_delta() == ""
    return text, deltas


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@given(text=st.text(max_size=40))
def test_deltas_of_encoded_text_are_its_decoding(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokens = ids_of(tokenizer, text)
    _, deltas = stream(tokenizer, tokens)
    assert "".join(deltas) == tokenizer.decode(tokens)


@hypothesis_settings(max_examples=60)
@given(tokens=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=120), skip=st.booleans())
def test_deltas_of_arbitrary_tokens_are_their_decoding(tokens: list[int], skip: bool) -> None:
    """Most of this is no UTF-8 at all."""
    _, deltas = stream(BYTE_LEVEL, tokens, skip_special_tokens=skip)
    assert "".join(deltas) == BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)


@given(st.lists(st.sampled_from("é€😀\ufffda"), max_size=40), st.integers(1, 5))
def test_deltas_of_broken_characters_are_their_decoding(characters: list[str], dropped: int) -> None:
    """Every so many bytes one is missing, over windows long enough to be cut."""
    spelt = spell("".join(characters)) if characters else []
    tokens = [token for index, token in enumerate(spelt) if index % (dropped + 1)]
    _, deltas = stream(BYTE_LEVEL, tokens)
    assert "".join(deltas) == BYTE_LEVEL.decode(tokens)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("prompt", ["The quick", "Köln 😀", "hello ", "😀😀", "n€€€"])
@given(text=st.text("ab €é😀 fox", min_size=1, max_size=30))
def test_after_a_prompt_the_text_goes_on(tokenizer: PreTrainedTokenizerFast, prompt: str, text: str) -> None:
    """A leading space of the answer stays, which decoding the answer alone would drop."""
    prompt_ids = ids_of(tokenizer, prompt)
    tokens = ids_of(tokenizer, text)
    whole = tokenizer.decode(prompt_ids + tokens)
    _, deltas = stream(tokenizer, tokens, prompt_ids)
    assert "".join(deltas) == whole[len(tokenizer.decode(prompt_ids)) :]


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_a_prompt_of_byte_tokens_goes_on_in_byte_tokens(character: str) -> None:
    """Such a tokenizer decodes a run of byte tokens as a whole or not at all, so it matters where it is cut."""
    tokens = ids_of(SENTENCEPIECE, character * 8)
    length = len(character.encode())
    answer = tokens[-4 * length :]
    assert stream(SENTENCEPIECE, answer, tokens[: -4 * length])[1] == (
        [""] * (length - 1) + [character]
    ) * 4 + [""]


def test_leading_space_depends_on_the_prompt() -> None:
    tokens = ids_of(SENTENCEPIECE, "fox")
    assert stream(SENTENCEPIECE, tokens, ids_of(SENTENCEPIECE, "The"))[0].text == " fox"
    assert stream(SENTENCEPIECE, tokens)[0].text == "fox"


def test_spaces_before_punctuation_are_not_tidied_away() -> None:
    """A tokenizer that tidies would take back a space that is already out."""
    words = Tokenizer(models.WordLevel({UNKNOWN: 0, "a": 1, ",": 2, "b": 3, ".": 4}, unk_token=UNKNOWN))
    tidy = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=True)
    assert tidy.decode([1, 2, 3, 4]) == "a, b."
    assert stream(tidy, [1, 2, 3, 4])[0].text == "a , b ."


@pytest.mark.parametrize("broken", range(0, 60, 5))
def test_a_character_is_whole_after_any_number_of_broken_bytes(broken: int) -> None:
    for ending in ("€", "😀", "é"):
        for length in range(1, len(spell(ending)) + 1):
            tokens = spell("€")[1:2] * broken + spell(ending)[:length] * 3 + spell(ending)
            assert stream(BYTE_LEVEL, tokens)[0].text == BYTE_LEVEL.decode(tokens)


def test_incomplete_characters_are_held_back() -> None:
    _, deltas = stream(BYTE_LEVEL, spell("a😀b€"))
    assert deltas == ["a", "", "", "", "😀", "b", "", "", "€", ""]
    _, deltas = stream(BYTE_LEVEL, spell("a€")[:-1])
    assert deltas == ["a", "", "", "\ufffd"]


def test_a_character_begun_in_the_prompt_is_finished_in_the_answer() -> None:
    spelt = spell("a€b")
    assert stream(BYTE_LEVEL, spelt[2:], spelt[:2])[1] == ["", "€", "b", ""]
    assert stream(BYTE_LEVEL, spelt[3:], spelt[:3])[1] == ["€", "b", ""]
    assert stream(BYTE_LEVEL, spell("😀")[3:], spell("long 😀")[:-1])[1] == ["😀", ""]
    assert stream(BYTE_LEVEL, spell("b"), spell("a\ufffd"))[0].text == "b"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip: bool) -> None:
    eos = BYTE_LEVEL.eos_token_id
    tokens = [*ids_of(BYTE_LEVEL, "one"), eos, *ids_of(BYTE_LEVEL, " two"), eos]
    assert stream(BYTE_LEVEL, tokens, skip_special_tokens=skip)[0].text == (
        "one two" if skip else "one<eos> two<eos>"
    )


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("start", ["", "The fox"])
def test_a_space_survives_many_tokens_without_text(tokenizer: PreTrainedTokenizerFast, start: str) -> None:
    """As when an ignored end-of-sequence token comes again and again."""
    tokens = [*ids_of(tokenizer, start), *[tokenizer.eos_token_id] * 60, *ids_of(tokenizer, "fox"), 0]
    tokens += ids_of(tokenizer, "dog")
    assert stream(tokenizer, tokens)[0].text == tokenizer.decode(tokens, skip_special_tokens=True)


class CountingTokenizer:
    """Counts the tokens it is asked to decode."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.decoded += len(token_ids)
        return str(BYTE_LEVEL.decode(token_ids, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(BYTE_LEVEL, name)


@pytest.mark.parametrize("kind", ["text", "end tokens", "broken bytes", "never whole"])
def test_each_token_costs_the_same_however_long_the_answer(kind: str) -> None:
    euro = spell("€")
    tokens = {
        "text": ids_of(BYTE_LEVEL, CORPUS[0] * 20),
        "end tokens": [BYTE_LEVEL.eos_token_id] * 2000,
        "broken bytes": euro[1:2] * 2000,
        "never whole": euro[:1] * 2000,
    }[kind]
    tokenizer = CountingTokenizer()
    text, _ = stream(tokenizer, tokens)
    assert text.text == BYTE_LEVEL.decode(tokens, skip_special_tokens=True)
    assert tokenizer.decoded < 50 * len(tokens)


def splits(text: str, count: int, seed: int) -> list[list[int]]:
    """The text as tokens, cut differently each time: pieces encoded one by one."""
    chooser = random.Random(seed)
    found = [spell(text), ids_of(BYTE_LEVEL, text)]
    for _ in range(count):
        cuts = sorted(chooser.sample(range(1, len(text)), 3))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found.append([token for piece in pieces for token in ids_of(BYTE_LEVEL, piece)])
    return found


@pytest.mark.parametrize(
    ("text", "stops", "expected", "matched"),
    [
        ("The fox stops here, please", ["here"], "The fox stops ", "here"),
        ("The fox stops here, please", ["fox", "The", "here"], "", "The"),
        ("one two three", ["wo", "two", " two"], "one", " two"),
        ("one two three", ["two three", "o t"], "one tw", "o t"),
        ("aab aaab", ["aaab"], "aab ", "aaab"),
        ("Köln 😀 Grüße", ["😀"], "Köln ", "😀"),
        ("Köln 😀 Grüße", ["üß"], "Köln 😀 Gr", "üß"),
        ("hello\n\nHuman: hi", ["\n\nHuman", "\n\n\n"], "hello", "\n\nHuman"),
        ("nothing of it", ["nothing of it."], "nothing of it", None),
    ],
)
def test_stop_strings_at_every_split(text: str, stops: list[str], expected: str, matched: str | None) -> None:
    for tokens in splits(text, 20, seed=1):
        got, deltas = stream(BYTE_LEVEL, tokens, stop=stops)
        assert (got.text, got.matched_stop) == (expected, matched)
        kept, _ = stream(BYTE_LEVEL, tokens, stop=stops, include_stop_str_in_output=True)
        assert kept.text == expected + (matched or "")
        assert not any(stop in "".join(deltas) for stop in stops)


def test_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    assert stream(BYTE_LEVEL, spell("xSTOx"), stop="STOP")[1] == ["x", "", "", "", "STOx", ""]
    assert stream(BYTE_LEVEL, spell("xST"), stop="STOP")[1] == ["x", "", "", "ST"]
    assert stream(BYTE_LEVEL, spell("xSSTOP!"), stop="STOP")[1] == ["x", "", "S", "", "", "", "", ""]


def test_a_stop_string_in_what_was_held_back_to_the_end() -> None:
    got, _ = stream(BYTE_LEVEL, spell("a€")[:-1], stop="\ufffd")
    assert (got.text, got.matched_stop) == ("a", "\ufffd")
    got, _ = stream(BYTE_LEVEL, spell("ab€")[:-1], stop="b\ufffd")
    assert (got.text, got.matched_stop) == ("a", "b\ufffd")


def test_stop_strings_count_only_once_min_tokens_is_reached() -> None:
    text = TextStream(BYTE_LEVEL, SamplingParams(stop=["ab", "cd"]))
    for token in spell("abc"):
        text.push(token, check_stop=False)
    before = (text.matched_stop, text.text)
    text.push(spell("d")[0])
    assert before == (None, "ab") and (text.matched_stop, text.text) == ("cd", "ab")


@pytest.mark.parametrize("stop", [".", "e. "])
def test_nothing_follows_a_match(stop: str) -> None:
    text = TextStream(BYTE_LEVEL, SamplingParams(stop=stop))
    for token in spell("one. two"):
        text.push(token)
    text.finish()
    assert text.text == text.take_delta() == "one. "[: "one. ".index(stop)]
    broken = spell("€")[1:2] * 60
    assert stream(BYTE_LEVEL, spell("xa") + broken, stop="a\ufffd")[0].text == "x"


@pytest.mark.parametrize(
    ("tokenizer", "params"), [(None, {"stop": "a"}), (BYTE_LEVEL, {"detokenize": False})], ids=["none", "off"]
)
def test_no_text_where_none_is_made(tokenizer: Any, params: dict[str, Any]) -> None:
    text, deltas = stream(tokenizer, spell("abc"), **params)
    assert text.text == "" and text.matched_stop is None and set(deltas) == {""}
