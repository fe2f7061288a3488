"""Sampling parameters that are lists or mappings: each checked, and kept as what cannot change."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from winnow.errors import InvalidRequestError
from winnow.values import checks
from winnow.values.checks import check_integer, check_length, check_list, check_number, show
from winnow.values.eviction_request import MAX_PROTECT, Protected

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters; text that could still become a stop string is held back
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100.0

integer = partial(check_integer, error=InvalidRequestError)
number = partial(check_number, error=InvalidRequestError)
require = partial(checks.require, error=InvalidRequestError)
_check_length = partial(check_length, error=InvalidRequestError)
_list = partial(check_list, error=InvalidRequestError)


def stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = (stop,)
    _list("stop", stop, "a string or a list of strings")
    _check_length("stop", stop, MAX_STOP_STRINGS)
    for text in stop:
        if not isinstance(text, str):
            raise InvalidRequestError(f"stop must hold strings, got {show(text)}")
        if not text:
            raise InvalidRequestError("stop must hold strings of at least 1 character, got ''")
        if len(text) > MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"stop must hold strings of at most {MAX_STOP_LENGTH} characters, got one of {len(text)}"
            )
    return tuple(stop)


def stop_token_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    _list("stop_token_ids", ids, "a list of integers")
    _check_length("stop_token_ids", ids, MAX_STOP_TOKEN_IDS)
    return tuple(integer("a token id in stop_token_ids", token, 0) for token in ids)


def forced_tokens(forced: Any, n: int) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
    """Return one list for all samples, or one for each of several."""
    _list("forced_tokens", forced, "a list of integers")
    if not forced or isinstance(forced[0], str | bytes) or not isinstance(forced[0], Sequence):
        return _forced_list(forced)
    require(len(forced) == n, "forced_tokens", f"one list, or one for each of the n = {n} samples", forced)
    lists = tuple(_forced_list(each) for each in forced)
    return lists if n > 1 else lists[0]


def _forced_list(tokens: Any) -> tuple[int, ...]:
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence):
        raise InvalidRequestError(f"a list in forced_tokens must hold integers, got {show(tokens)}")
    return tuple(integer("a token id in forced_tokens", token, 0) for token in tokens)


def spans(spans: Any) -> tuple[tuple[int, int] | Protected, ...]:
    _list("protect", spans, "a list of pairs [start, end]")
    checked = [_protected(each) for each in spans if isinstance(each, Mapping | Protected)]
    pairs = [each for each in spans if not isinstance(each, Mapping | Protected)]
    for span in _pairs("protect", pairs, "[start, end]"):
        start = integer("a start in protect", span[0], 0)
        checked.append((start, integer("an end in protect", span[1], start + 1)))
    return tuple(checked)


def _protected(named: Any) -> Any:
    if isinstance(named, Protected):
        return named
    if named == {"images": True}:
        return Protected(None)
    if list(named) == ["text"] and isinstance(named["text"], str) and named["text"]:
        return Protected(named["text"])
    raise InvalidRequestError(
        f'protect must hold pairs [start, end], {{"images": true}} or {{"text": words}}, got {show(named)}'
    )


def _pairs(name: str, pairs: Any, form: str) -> Iterator[Sequence[Any]]:
    _list(name, pairs, f"a list of pairs {form}")
    _check_length(name, pairs, MAX_PROTECT)
    for pair in pairs:
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidRequestError(f"{name} must hold pairs {form}, got {show(pair)}")
        yield pair


def bad_words(words: Any) -> tuple[Any, ...]:
    """Return words as they are given, or tokens that `with_bad_tokens` made of them."""
    found = tuple(words) if isinstance(words, list | tuple) else (words,)
    for word in found:
        is_text = isinstance(word, str) and bool(word.strip())
        cut = isinstance(word, tuple) and bool(word) and all(type(token) is int for token in word)
        require(is_text or cut, "bad_words", "texts that are not empty", words)
    _check_length("bad_words", found, MAX_STOP_TOKEN_IDS)
    return found


def logit_bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(f"logit_bias must map token ids to numbers, got {show(bias)}")
    _check_length("logit_bias", bias, MAX_LOGIT_BIAS_ENTRIES)
    checked = {}
    for token, value in bias.items():
        token = integer("a token id in logit_bias", token, 0)
        checked[token] = number(f"logit_bias of token {show(token)}", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return checked


def token_key(key: Any) -> Any:
    """Return a JSON object's key as a token id where it is one; what is not, is left for `logit_bias` to refuse."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
