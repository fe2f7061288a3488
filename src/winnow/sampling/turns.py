"""Tokens of conversations that were answered, by their text: a tokenizer may cut an answer otherwise than the model."""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from winnow.sampling.token_table import TokenTable

MAX_TOKENS = 8 * 2**20
"""Tokens of turns that are kept, in 4 bytes each."""


@dataclass(frozen=True, eq=False)
class _Turn:
    before: "_Turn | None"
    token_ids: NDArray[np.int32]  # its own: the prompt behind `before`, and the answer

    def all_ids(self) -> list[int]:
        parts: list[NDArray[np.int32]] = []
        turn: _Turn | None = self
        while turn is not None:
            parts.append(turn.token_ids)
            turn = turn.before
        found: list[int] = np.concatenate(parts[::-1]).tolist()
        return found


class Turns:
    """Conversations up to their answers, so that a later turn repeats the tokens that were computed. Thread-safe.

    A turn is found where its whole text stands before a special token, as chat templates end turns with one: tokenizers
    cut there too. Space around an answer does not matter, which templates and clients add and strip. Where they have
    changed anything else, the turns before the change are found. The least recently used go first.
    """

    def __init__(self, tokens: TokenTable | None, max_tokens: int = MAX_TOKENS) -> None:
        self._tokens = tokens
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()
        self._lock = Lock()
        texts = [] if tokens is None else sorted(filter(None, tokens.special.values()), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None

    def add(
        self, tenant: str | None, prompt: str, prompt_ids: list[int], tail: int, answer_ids: list[int]
    ) -> None:
        """Remember an answer to a conversation as text; a special token that ends it is none of it. The template wrote
        the last `tail` tokens of the prompt behind the question."""
        if self._tokens is None or self._special is None or not answer_ids:
            return
        own = answer_ids[:-1] if answer_ids[-1] in self._tokens.special else answer_ids
        answer = b"".join(map(self._tokens.bytes_of, own)).decode(errors="replace")
        with self._lock:
            before, known, key = None, 0, b""
            for end, key in self._keys(tenant, prompt + answer, self._tokens.decode(prompt_ids[-tail:])):
                turn = self._turns.get(key)
                if turn is not None and end <= len(prompt):
                    ids = turn.all_ids()
                    if prompt_ids[: len(ids)] == ids:
                        before, known = turn, len(ids)
            if key in self._turns:
                return
            turn = _Turn(before, np.array([*prompt_ids[known:], *own], dtype=np.int32))
            self._turns[key] = turn
            self._num_tokens += len(turn.token_ids)
            while self._num_tokens > self._max_tokens:
                self._num_tokens -= len(self._turns.popitem(last=False)[1].token_ids)

    def encode(
        self, tenant: str | None, text: str, tail: str, encode: Callable[[str], list[int]]
    ) -> list[int]:
        """Return the tokens of a prompt that a template made: those of its turns that are known, and `encode`'s. The
        template wrote `tail` behind the question."""
        start, found = 0, None
        with self._lock:
            keys = []
            for end, key in self._keys(tenant, text, tail):
                if (turn := self._turns.get(key)) is not None and end < len(text):
                    start, found = end, turn
                    keys.append(key)
            for key in reversed(keys):  # a turn goes before those that it needs
                self._turns.move_to_end(key)
        return encode(text) if found is None else found.all_ids() + encode(text[start:])

    def _keys(self, tenant: str | None, text: str, tail: str) -> Iterator[tuple[int, bytes]]:
        """Yield where a turn may end in a text, with the key of all before that, and the text's own end."""
        state, start = sha256(repr(tenant).encode()), 0
        begin = tail[max((0, *self._starts(tail))) :].rstrip()  # of an answer
        for end in (*self._starts(text), len(text)):
            piece = text[start:end]
            if begin:
                piece = re.sub(f"{re.escape(begin)}\\s+", lambda _: begin, piece)
            state.update(piece.rstrip().encode(errors="surrogatepass"))
            start = end
            yield end, state.digest()

    def _starts(self, text: str) -> list[int]:
        return [] if self._special is None else [each.start() for each in self._special.finditer(text)]
