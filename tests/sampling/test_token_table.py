"""Tokens' bytes against the text that they make, for every kind of tokenizer."""

from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizer_kinds import BYTE_LEVEL, KINDS, SENTENCEPIECE, UNKNOWN
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from winnow.engine.requests.request import Request
from winnow.engine.requests.request_table import OutputState
from winnow.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from winnow.outputs import CompletionOutput, RequestMetrics
from winnow.sampling import Logprob, SamplingParams, TextStream
from winnow.sampling.token_table import TokenTable

TEXTS = st.text(st.sampled_from("ab fox.Th,é€😀\ufffd日\n") | st.characters(codec="utf-8"), max_size=30)
FALLBACK = {kind: KINDS[kind] for kind in ("llama-2", "gemma")}

every_kind = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS.keys())
with_fallback = pytest.mark.parametrize("tokenizer", FALLBACK.values(), ids=FALLBACK.keys())


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def byte_ids(tokenizer: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]


def answer_of(
    tokenizer: PreTrainedTokenizerFast, tokens: list[int], prompt: list[int], **params: Any
) -> CompletionOutput:
    """The finished answer whose tokens these are, with logprobs of each and of a few others."""
    request = Request(
        "a",
        None,
        prompt,
        SamplingParams(max_tokens=1000, logprobs=3, **params),
        1000,
        RequestMetrics(arrival_time=0.0),
    )
    [sequence] = request.sequences
    state = OutputState(sequence, TokenTable(tokenizer), frozenset())
    for token in tokens:
        others = [(token + step) % len(tokenizer) for step in (0, 7, 100)]
        logprobs = {each: Logprob(-1.0 - rank, rank + 1) for rank, each in enumerate(others)}
        if state.append_token(token, logprobs) is not None:
            break
    state.finish()
    return state.output(None)


def check(answer: CompletionOutput) -> None:
    """Joined bytes are the answer, also those of the records; offsets ascend within the text."""
    assert answer.logprobs is not None
    own = [
        logprobs[token] for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True) if logprobs
    ]
    joined = b"".join(entry.token_bytes or b"" for entry in own)
    assert joined.decode(errors="replace") == answer.text
    chat, completion = chat_logprobs(answer), completion_logprobs(answer, TextOffsets())
    assert chat is not None and completion is not None
    assert bytes(byte for entry in chat["content"] for byte in entry["bytes"]) == joined
    offsets = completion["text_offset"]
    assert offsets == sorted(offsets) and all(0 <= offset <= len(answer.text) for offset in offsets)
    for entry, logprobs in zip(chat["content"], answer.logprobs, strict=True):
        assert logprobs is not None and len(entry["top_logprobs"]) == len(logprobs)
    for token, top, value, logprobs in zip(
        completion["tokens"],
        completion["top_logprobs"],
        completion["token_logprobs"],
        answer.logprobs,
        strict=True,
    ):
        assert logprobs is not None and top[token] == value
        assert sorted(top.values()) == sorted(entry.logprob for entry in logprobs.values())


@every_kind
@pytest.mark.parametrize("prompt", ["", "The fox", "Köln 😀", "<eos>"])
@pytest.mark.parametrize("skip", [True, False])
@given(text=TEXTS)
def test_bytes_of_encoded_text_are_the_answer(
    tokenizer: PreTrainedTokenizerFast, prompt: str, skip: bool, text: str
) -> None:
    answer = answer_of(
        tokenizer, ids_of(tokenizer, text), ids_of(tokenizer, prompt), skip_special_tokens=skip
    )
    check(answer)
    assert "".join(deltas_of(tokenizer, answer.token_ids, ids_of(tokenizer, prompt), skip)) == answer.text


@every_kind
@given(data=st.data(), skip=st.booleans())
def test_bytes_of_arbitrary_tokens_are_the_answer(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject, skip: bool
) -> None:
    """Special tokens in the middle, characters cut in two, and most of it no UTF-8 at all."""
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    prompt = data.draw(st.sampled_from(["", "The fox", "<eos>"]))
    check(answer_of(tokenizer, tokens, ids_of(tokenizer, prompt), skip_special_tokens=skip))


def deltas_of(tokenizer: Any, tokens: list[int], prompt: list[int], skip: bool) -> list[str]:
    stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=skip), prompt)
    deltas = []
    for token in tokens:
        stream.push(token)
        deltas.append(stream.take_delta())
    stream.finish()
    return [*deltas, stream.take_delta()]


@every_kind
@given(text=st.text("Thequickbrownfox .,GrüßeKöln", max_size=30))
def test_encoded_text_is_the_tokenizers_own_decoding(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokens = ids_of(tokenizer, text)
    expected = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert answer_of(tokenizer, tokens, []).text == expected


def test_parts_of_characters() -> None:
    """Both spellings of ö, in two bytes."""
    for tokenizer, tokens in (
        (BYTE_LEVEL, [BYTE_LEVEL.convert_tokens_to_ids(each) for each in "Ã¶"]),
        (SENTENCEPIECE, byte_ids(SENTENCEPIECE, b"\xc3\xb6")),
    ):
        answer = answer_of(tokenizer, tokens, ids_of(tokenizer, "The"))
        chat, completion = chat_logprobs(answer), completion_logprobs(answer, TextOffsets())
        assert answer.text == "ö" and chat is not None and completion is not None
        assert [entry["bytes"] for entry in chat["content"]] == [[195], [182]]
        assert [entry["token"] for entry in chat["content"]] == ["\\xc3", "\\xb6"]
        assert completion["tokens"] == ["bytes:\\xc3", "bytes:\\xb6"]
        assert completion["text_offset"] == [0, 0]


def test_leading_spaces_tell_tokens_apart() -> None:
    table = TokenTable(SENTENCEPIECE)
    with_space, without = (SENTENCEPIECE.convert_tokens_to_ids(each) for each in ("▁fox", "fox"))
    if SENTENCEPIECE.unk_token_id in (with_space, without):
        with_space, without = (SENTENCEPIECE.convert_tokens_to_ids(each) for each in ("▁", "f"))
    assert table.bytes_of(with_space).startswith(b" ") and not table.bytes_of(without).startswith(b" ")


def test_tokens_of_one_text_do_not_hide_each_other() -> None:
    """A letter and the byte token of the same letter."""
    letter = SENTENCEPIECE.convert_tokens_to_ids("o")
    byte = SENTENCEPIECE.convert_tokens_to_ids("<0x6F>")
    assert letter != byte
    logprobs = {byte: Logprob(-2.0, 2), letter: Logprob(-1.0, 1)}
    answer = CompletionOutput(0, "o", [byte], logprobs=[decoded(logprobs)])
    completion = completion_logprobs(answer, TextOffsets())
    assert completion is not None
    assert completion["tokens"] == ["o"] and completion["top_logprobs"] == [
        {"o": -2.0, f"token_id:{letter}": -1.0}
    ]


def decoded(logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
    from winnow.sampling.logprobs import decode_logprobs

    return decode_logprobs(TokenTable(SENTENCEPIECE), logprobs, skip_special_tokens=True)


@with_fallback
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (b"\xc3", b"\xb6!", "ö!"),  # the answer finishes the prompt's character
        (b"\xc3", b"\xc3\xb6", "ö"),  # it does not, and begins another
        (b"\xe2\x82", b"\xc3\xb6\xc3\xb6", "öö"),
        (b"\xf0\x9f", b"\x98\x80", "😀"),
        (b"\xf0\x9f", b"\x98", ""),
        (b"\xef\xbf", b"\xbd", "\ufffd"),
        (b"a\x80\x80", b"\xc3\xb6", "ö"),
        (b"\xed\xa0", b"0", "0"),  # of a surrogate, which UTF-8 does not have
        (b"\xc3\xb6" * 9, b"\xc3\xb6", "ö"),
        (b"\xb6" + b"\xc3\xb6" * 9, b"\xc3\xb6", "ö"),
        (b"", b"\xc3\xb6\xc3", "ö\ufffd"),
        (b"", b"\xc3\xc3\xb6", "\ufffdö"),  # one wrong byte spoils no other
    ],
)
def test_a_prompt_that_ends_within_a_character(
    tokenizer: PreTrainedTokenizerFast, before: bytes, after: bytes, expected: str
) -> None:
    prompt = [*ids_of(tokenizer, "The"), *byte_ids(tokenizer, before)]
    deltas = deltas_of(tokenizer, byte_ids(tokenizer, after), prompt, True)
    assert "".join(deltas) == expected
    tail = ids_of(tokenizer, " fox")
    spoken = deltas_of(tokenizer, byte_ids(tokenizer, after) + tail, prompt, True)
    assert "".join(spoken).endswith("fox")
    assert "".join(spoken).removesuffix("fox").rstrip(" ") == expected


@with_fallback
@given(st.binary(max_size=20), TEXTS)
def test_a_prompt_of_any_bytes_spoils_no_answer(
    tokenizer: PreTrainedTokenizerFast, before: bytes, text: str
) -> None:
    tokens = byte_ids(tokenizer, text.encode())
    assert "".join(deltas_of(tokenizer, tokens, byte_ids(tokenizer, before), True)) == text


@every_kind
@pytest.mark.parametrize("include", [False, True])
def test_a_special_token_as_stop_string(tokenizer: PreTrainedTokenizerFast, include: bool) -> None:
    tokens = [*ids_of(tokenizer, "The fox"), tokenizer.eos_token_id, *ids_of(tokenizer, "dog")]
    prompt = ids_of(tokenizer, "Human")
    before = answer_of(tokenizer, tokens[: tokens.index(tokenizer.eos_token_id)], prompt).text
    for skip in (True, False):
        answer = answer_of(
            tokenizer,
            tokens,
            prompt,
            stop=["<eos>"],
            include_stop_str_in_output=include,
            skip_special_tokens=skip,
        )
        shown = answer.text.removesuffix("<eos>").rstrip() if include else answer.text.rstrip()
        assert shown == before and answer.text.endswith("<eos>") == include
        assert answer.token_ids[-1] == tokenizer.eos_token_id


def test_stop_strings_around_special_tokens() -> None:
    eos = BYTE_LEVEL.eos_token_id

    def ended(*stops: str, **params: Any) -> tuple[str, str | None]:
        tokens = [*ids_of(BYTE_LEVEL, "one\n"), eos, *ids_of(BYTE_LEVEL, "two"), eos, eos]
        stream = TextStream(BYTE_LEVEL, SamplingParams(stop=list(stops), **params))
        for token in tokens:
            stream.push(token)
        stream.finish()
        return stream.text, stream.matched_stop

    assert ended("\n<eos>") == ("one", "\n<eos>")
    assert ended("\n<eos>", include_stop_str_in_output=True) == ("one\n<eos>", "\n<eos>")
    assert ended("<eos>tw") == ("one\n", "<eos>tw")
    assert ended("<eos><eos>") == ("one\ntwo", "<eos><eos>")
    assert ended("<eos><eos>", "\ntw") == ("one", "\ntw")
    assert ended("<eos><eos>", "o") == ("", "o")
    assert ended("wo<eos><eos>", "nowhere") == ("one\nt", "wo<eos><eos>")
    assert ended("<eos>three", "nowhere") == ("one\ntwo", None)
    stream = TextStream(BYTE_LEVEL, SamplingParams(stop="<eos>"))
    for token in ids_of(BYTE_LEVEL, "a <eos"):  # spelt out
        stream.push(token, check_stop=True)
    assert stream.text == "a " or stream.text == "a"
    stream.push(eos, check_stop=False)  # before min_tokens
    assert stream.matched_stop is None


def test_a_vocabulary_that_lacks_some_bytes() -> None:
    """As after pruning; what is there is known, and unknown tokens are no bytes."""
    vocab = {UNKNOWN: 0, "▁": 1, "a": 2, "<0xC3>": 3, "<0xB6>": 4, "<0x2E>": 5}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN, byte_fallback=True))
    backend.decoder = SENTENCEPIECE.backend_tokenizer.decoder
    for kept in (backend, backend_without(vocab, "<0x2E>")):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=kept, unk_token=UNKNOWN)
        table = TokenTable(tokenizer)
        assert [table.bytes_of(token) for token in (1, 2, 3, 4)] == [b" ", b"a", b"\xc3", b"\xb6"]
        assert 0 not in table.byte_tokens
        assert answer_of(tokenizer, [3, 4, 1, 2, 0, 2], [2]).text == "ö aa"


def backend_without(vocab: dict[str, int], token: str) -> Tokenizer:
    fewer = {each: index for each, index in vocab.items() if each != token}
    backend = Tokenizer(models.BPE(vocab=fewer, merges=[], unk_token=UNKNOWN, byte_fallback=True))
    backend.decoder = SENTENCEPIECE.backend_tokenizer.decoder
    return backend


def test_words_without_a_decoder() -> None:
    words = Tokenizer(models.WordLevel({UNKNOWN: 0, "one": 1, "two": 2, "<0x41>": 3}, unk_token=UNKNOWN))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=UNKNOWN)
    table = TokenTable(tokenizer)
    assert not table.byte_tokens and table.bytes_of(3) == b" <0x41>"
    check(answer_of(tokenizer, [1, 2, 3, 0, 1], [2]))
    check(answer_of(tokenizer, [1, 2, 3, 0, 1], []))


@every_kind
@given(data=st.data(), stop=st.sampled_from(["o", "x.", "é", "<eos>"]), include=st.booleans())
def test_offsets_stay_within_a_text_that_was_cut(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject, stop: str, include: bool
) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    answer = answer_of(
        tokenizer, tokens, ids_of(tokenizer, "The"), stop=[stop], include_stop_str_in_output=include
    )
    completion = completion_logprobs(answer, TextOffsets())
    assert completion is not None
    offsets = completion["text_offset"]
    assert offsets == sorted(offsets) and all(0 <= offset <= len(answer.text) for offset in offsets)
    assert stop not in (answer.text.removesuffix(stop) if include else answer.text)
