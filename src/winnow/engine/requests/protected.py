"""Positions of what a request protects by name."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from winnow.errors import InvalidRequestError
from winnow.sampling import SamplingParams
from winnow.sampling.token_table import TokenTable
from winnow.values.eviction_request import Protected
from winnow.values.images import PromptImage


def with_spans(
    params: SamplingParams, token_ids: list[int], images: Sequence[PromptImage], tokens: TokenTable | None
) -> SamplingParams:
    """Return parameters whose `protect` has positions alone, those of the context.

    Raises:
        InvalidRequestError: the prompt has no pictures, or not those words.
    """
    if not any(isinstance(each, Protected) for each in params.protect):
        return params
    found: list[tuple[int, int]] = []
    end = len(token_ids) if params.context_tokens is None else params.context_tokens
    for each in params.protect:
        if not isinstance(each, Protected):
            found.append(each)
            continue
        if each.text is None:
            spans: Iterable[tuple[int, int]] = [image.span for image in images]
        else:
            spans = _spans_of(each.text, token_ids, tokens)
        if not spans:
            what = "images" if each.text is None else f"text {each.text!r}"
            raise InvalidRequestError(f"protect names {what}, and the prompt has none")
        found += [(first, min(last, end)) for first, last in spans if first < end]
    return replace(params, protect=tuple(found))


def _spans_of(text: str, token_ids: list[int], tokens: TokenTable | None) -> list[tuple[int, int]]:
    """Return the tokens, half-open, of each place where a text stands."""
    if tokens is None:
        raise InvalidRequestError("protect names text, and the model's directory has no tokenizer")
    pieces = [tokens.bytes_of(token, first=not index) for index, token in enumerate(token_ids)]
    ends, whole, wanted = (
        np.fromiter(accumulate(map(len, pieces)), dtype=np.int64),
        b"".join(pieces),
        text.encode(),
    )
    spans, at = [], whole.find(wanted)
    while at >= 0:
        first, last = np.searchsorted(ends, (at, at + len(wanted) - 1), side="right").tolist()
        spans.append((first, last + 1))
        at = whole.find(wanted, at + 1)
    return spans
