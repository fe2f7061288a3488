"""From tokens to text, one token at a time."""

from collections.abc import Sequence
from typing import Any, Protocol

from winnow.sampling.params import SamplingParams
from winnow.sampling.stops import StopMatcher

_REPLACEMENT = "\ufffd"
_CONTEXT = 6  # tokens that surely hold the last character and begin one: it may take four byte tokens
_LIMIT = 24  # tokens of a window without a settled end, before it is cut


class Tokenizer(Protocol):
    """The one thing asked of a tokenizer; those of transformers have it."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **options: Any) -> Any:
        """The text of these tokens."""
        ...


class Detokenizer:
    """The text that each further token adds.

    A token's text depends on its neighbours: a character's bytes may be spread over tokens, and some
    tokenizers drop a leading space. So a small window of tokens is decoded, and what it holds beyond the text
    already known is new, as vLLM and text-generation-inference do; while its last character is incomplete it
    waits. Model output need not be UTF-8 at all, nor every token have text: the window stays bounded then
    too.

    Args:
        tokenizer: any whose text, once complete, does not change when more tokens follow.
        skip_special_tokens: leave them out.
        prompt_token_ids: what the answer follows.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        for size in range(_CONTEXT, _CONTEXT - 4, -1):
            self._window = list(prompt_token_ids[-size:])
            self._known = self._decode()  # the text of the window's
            self._settled = len(self._window)  # first tokens
            # Half a character in front makes some tokenizers give up on all bytes that follow it.
            if not self._known.startswith(_REPLACEMENT):
                break

    def _decode(self) -> str:
        # Tidying spaces before punctuation would change text that is already out.
        text = self._tokenizer.decode(
            self._window, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "a flat list of tokens decodes to one string"
        return text

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        self._window.append(token_id)
        text = self._decode()
        if text.endswith(_REPLACEMENT):
            return self._cut(text) if len(self._window) - self._settled >= _LIMIT else ""
        new = self._beyond_known(text)
        if new:
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._known = self._decode()
        elif text or len(self._window) >= _LIMIT:
            self._window.pop()  # a token without text, such as a skipped special one, is no context
        return new

    def flush(self) -> str:
        """What was still uncertain, as the tokenizer writes an incomplete character."""
        text = self._decode()
        new = self._beyond_known(text)
        self._known = text
        return new

    def _beyond_known(self, text: str) -> str:
        # A prompt may end within a character: its replacement is not text that the answer can follow.
        known = self._known if text.startswith(self._known) else self._known.rstrip(_REPLACEMENT)
        return text[len(known) :]

    def _cut(self, text: str) -> str:
        """Settle a window that never ends with a whole character, but for its last, which may still change."""
        new = self._beyond_known(text)
        del self._window[:-_CONTEXT]
        self._settled = 0
        self._known = self._decode().removesuffix(_REPLACEMENT)
        return new.removesuffix(_REPLACEMENT)


class TextStream:
    """The text of one answer as it grows, cut at the first stop string.

    Of text that could still change nothing is shown: neither a character whose bytes are incomplete nor an
    ending that could become a stop string. With a prompt, the text is what the tokenizer writes after the
    prompt, a leading space included; without, what it writes for the answer alone.

    Args:
        tokenizer: of transformers; None: the text stays empty.
        params: `stop`, `include_stop_str_in_output`, `skip_special_tokens` and `detokenize` are read.
        prompt_token_ids: what the answer follows; only its last few tokens are looked at.

    Attributes:
        matched_stop: the stop string that ended the text. Tokens pushed after it are ignored.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self.matched_stop: str | None = None
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, prompt_token_ids)
        self._stops = StopMatcher(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        self._pieces: list[str] = []
        self._taken = 0  # pieces given out
        self._held = ""  # the beginning of a stop string, perhaps
        self._check_stop = True

    @property
    def text(self) -> str:
        """All text that is certain so far: what `take_delta` has given and would give now."""
        return "".join(self._pieces)

    def push(self, token_id: int, check_stop: bool = True) -> None:
        """Add a token.

        Args:
            token_id: the next of the answer.
            check_stop: False before `min_tokens` is reached: a stop string that ends in this token's text is
                ignored.
        """
        if self._detokenizer is None or self.matched_stop is not None:
            return
        self._check_stop = check_stop
        self._append(self._detokenizer.push(token_id))

    def take_delta(self) -> str:
        """The text that became certain since the last call."""
        delta = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return delta

    def finish(self) -> None:
        """No token will follow: what was held back is certain now."""
        if self._detokenizer is None or self.matched_stop is not None:
            return
        self._append(self._detokenizer.flush())
        self._settle(self._held)
        self._held = ""

    def _append(self, new: str) -> None:
        match = self._stops.feed(new, self._check_stop)
        text = self._held + new
        if match is None:
            certain = len(text) - self._stops.pending
            self._held = text[certain:]
        else:
            self.matched_stop = match.stop
            certain = len(self._held) + match.end - (0 if self._include_stop else len(match.stop))
            self._held = ""
        self._settle(text[:certain])

    def _settle(self, text: str) -> None:
        if text:
            self._pieces.append(text)
