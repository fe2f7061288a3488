"""Meaning of single tokens: their bytes, and which of them are special."""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol

REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """The one thing asked of a tokenizer; those of transformers have it, and tell more."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **options: Any) -> Any: ...


class TokenTable:
    """Table of the tokens of a tokenizer of transformers, or of anything that decodes; what was found is kept.

    How bytes are spelt is read from the tokenizer's own description of its decoder. Byte-level BPE (GPT-2, Llama 3)
    writes every byte as one of 256 characters. SentencePiece with byte fallback (Llama 2, Mistral, Gemma) has a token
    `<0xNN>` for each byte beside tokens of whole characters. All other kinds (Unigram, WordPiece, words) know whole
    characters alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Any = tokenizer
        self._bytes: dict[int, bytes] = {}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        # Tidying spaces before punctuation would change text that is already out.
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        text = self._tokenizer.decode(token_ids, **options)
        assert isinstance(text, str), "a flat list of tokens decodes to one string"
        return text

    def bytes_of(self, token: int, first: bool = False) -> bytes:
        """Return the bytes that a token adds to the text: part of a character, or of several, or whole ones. As `first`
        it has nothing before it, so that many tokenizers drop its leading space."""
        if first and token not in self.byte_tokens:
            text = self.decode([token])
            return self.bytes_of(token) if REPLACEMENT in text else text.encode()
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find_bytes(token)
        return found

    def text_of(self, token: int) -> str:
        """Return what `bytes_of` does, with a replacement character for each part of a character."""
        return self.bytes_of(token).decode(errors="replace")

    @cached_property
    def special(self) -> Mapping[int, str]:
        """The special tokens with their texts: what `skip_special_tokens` leaves out."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        found = {token: str(each.content) for token, each in added.items() if each.special}
        for token in getattr(self._tokenizer, "all_special_ids", ()):
            if token not in found:
                found[token] = str(self._tokenizer.convert_ids_to_tokens(token))
        return found

    @cached_property
    def byte_tokens(self) -> Mapping[int, int]:
        """The tokens that are one byte by fallback, and which; empty where the tokenizer has no byte fallback."""
        find = getattr(self._tokenizer, "convert_tokens_to_ids", None)
        # A tokenizer that describes no decoder (SentencePiece's own) may have the tokens all the same.
        if find is None or not (self._decoder_kinds is None or "ByteFallback" in self._decoder_kinds):
            return {}
        # A byte that the vocabulary lacks is answered with the unknown token, or with none.
        missing = (None, getattr(self._tokenizer, "unk_token_id", None))
        tokens = {find(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return {token: byte for token, byte in tokens.items() if token not in missing}

    @cached_property
    def _decoder_kinds(self) -> frozenset[str] | None:
        """The kinds of steps of the tokenizer's decoder; None: it describes none."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        try:  # the decoder's part of `backend.to_str()`, without the vocabulary
            description = json.loads(backend.decoder.__getstate__())
        except Exception:  # no decoder, or one in Python, which has no description
            return frozenset()
        return frozenset(_kinds(description))

    @cached_property
    def _byte_of(self) -> Mapping[str, int]:
        # As GPT-2 writes bytes: those that are printable in Latin-1 by themselves, the others from U+0100 on.
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = (byte for byte in range(256) if byte not in shown)
        return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}

    def _find_bytes(self, token: int) -> bytes:
        # What a second one adds to a first, so that a leading space stays and continuations are joined.
        once, twice = self.decode([token]), self.decode([token, token])
        text = twice[len(once) :] if twice.startswith(once) else once
        if REPLACEMENT not in text:
            return text.encode()
        if token in self.byte_tokens:
            return bytes([self.byte_tokens[token]])
        if self._decoder_kinds and "ByteLevel" in self._decoder_kinds:
            characters = str(self._tokenizer.convert_ids_to_tokens(token))
            if all(character in self._byte_of for character in characters):
                return bytes(self._byte_of[character] for character in characters)
        return text.encode()


def _kinds(description: dict[str, Any]) -> Iterator[str]:
    yield description["type"]
    for step in description.get("decoders", ()):
        yield from _kinds(step)
