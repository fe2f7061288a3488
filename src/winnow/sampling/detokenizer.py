"""The text that each further token adds."""

import codecs
from collections.abc import Sequence

from winnow.sampling.token_table import REPLACEMENT, TokenTable

_CONTEXT = 6  # tokens that surely hold the last character and begin one: it may take four byte tokens
_LIMIT = 24  # tokens of a window without a settled end, before it is cut


class Detokenizer:
    """The text that each further token adds.

    A token's text depends on its neighbours: a character's bytes may be spread over tokens, and some
    tokenizers drop a leading space. So a small window of tokens is decoded, and what it holds beyond the text
    already known is new, as vLLM and text-generation-inference do; while its last character is incomplete it
    waits. Model output need not be UTF-8 at all, nor every token have text: the window stays bounded then
    too.

    Tokens that are one byte by fallback never enter the window: such tokenizers give up on a whole run of them for one
    wrong byte, which may stand in the prompt. They are joined here, and in the window a byte token of a visible
    character takes their place.

    Args:
        table: of a tokenizer whose text, once complete, does not change when more tokens follow.
        skip_special_tokens: leave them out.
        prompt_token_ids: what the answer follows.

    Attributes:
        at_start: whether nothing stands before the next token's text, neither of the prompt nor of the answer.
    """

    def __init__(self, table: TokenTable, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        self._skip_special_tokens = skip_special_tokens
        # Without a token to stand for them, byte tokens are left to the tokenizer.
        self._neutral = table.neutral_token
        self._byte_tokens = {} if self._neutral is None else table.byte_tokens
        self._bytes = _ByteRun(self._trailing_bytes(prompt_token_ids))
        for size in range(_CONTEXT, _CONTEXT - 4, -1):
            self._start(self._without_bytes(prompt_token_ids[-size:]))
            # Half a character in front makes some tokenizers give up on all bytes that follow it.
            if not self._known.startswith(REPLACEMENT):
                break
        self.at_start = not self._known

    def push(self, token_id: int) -> str:
        """Return the text that is certain now and was not before."""
        if self._skip_special_tokens and token_id in self._table.special:
            return ""
        self.at_start = False
        byte = self._byte_tokens.get(token_id)
        if byte is None:
            return self._bytes.end() + self._push(token_id)
        assert self._neutral is not None, "else no token is looked up as a byte"
        text = self._flush_window() if len(self._window) > self._settled else ""
        self._start([self._neutral])
        return text + self._bytes.push(byte)

    def flush(self) -> str:
        """Return what was still uncertain, as the tokenizer writes an incomplete character."""
        return self._flush_window() + self._bytes.end()

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode()
        if text.endswith(REPLACEMENT):
            return self._cut(text) if len(self._window) - self._settled >= _LIMIT else ""
        new = self._beyond_known(text)
        if new:
            self._start(self._window[self._settled :])
        elif text or len(self._window) >= _LIMIT:
            self._window.pop()  # a token without text, such as a skipped special one, is no context
        return new

    def _start(self, window: list[int]) -> None:
        """Let a window's text be known."""
        self._window = window
        self._settled = len(window)
        self._known = self._decode()  # the text of the window's first tokens, those that are settled

    def _decode(self) -> str:
        return self._table.decode(self._window, self._skip_special_tokens)

    def _flush_window(self) -> str:
        text = self._decode()
        new = self._beyond_known(text)
        self._known = text
        return new

    def _beyond_known(self, text: str) -> str:
        # A prompt may end within a character: its replacement is not text that the answer can follow.
        known = self._known if text.startswith(self._known) else self._known.rstrip(REPLACEMENT)
        return text[len(known) :]

    def _cut(self, text: str) -> str:
        """Settle a window that never ends with a whole character, but for its last, which may still change."""
        new = self._beyond_known(text)
        del self._window[:-_CONTEXT]
        self._settled = 0
        self._known = self._decode().removesuffix(REPLACEMENT)
        return new.removesuffix(REPLACEMENT)

    def _trailing_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of the byte tokens at the end, the last few of them."""
        found: list[int] = []
        for token in reversed(tokens[-_CONTEXT:]):
            if token not in self._byte_tokens:
                break
            found.append(self._byte_tokens[token])
        return bytes(reversed(found))

    def _without_bytes(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens after the last byte token, with a whole one for all that stands before."""
        for index in range(len(tokens) - 1, -1, -1):
            if tokens[index] in self._byte_tokens:
                assert self._neutral is not None, "else no token is looked up as a byte"
                return [self._neutral, *tokens[index + 1 :]]
        return list(tokens)


class _ByteRun:
    """Run of bytes that is joined to text.

    Args:
        before: bytes of the prompt that they follow: the answer may finish a character that the prompt began, and one
            that it does not finish is none of its text.
    """

    def __init__(self, before: bytes) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(before)
        self._of_prompt = bool(self._pending)

    @property
    def _pending(self) -> bytes:
        return self._decoder.getstate()[0]

    def push(self, byte: int) -> str:
        """Return the characters that are complete, or broken, with this byte."""
        before = self._pending
        text = self._decoder.decode(bytes([byte]))
        if self._of_prompt and text:
            self._of_prompt = False
            if text.encode() != before + bytes([byte]):  # the answer does not finish what the prompt began
                return text[len(before.decode(errors="replace")) :]
        return text

    def end(self) -> str:
        """Return the replacement of what is incomplete: no byte follows."""
        if not self._pending:
            return ""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        of_prompt, self._of_prompt = self._of_prompt, False
        # With bytes of the answer among those pending it is still the prompt's character that was never finished.
        return "" if of_prompt else text
