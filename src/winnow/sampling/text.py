"""Text of answers: from tokens to text, one token at a time, up to a stop string."""

import codecs
from collections.abc import Sequence

from winnow.sampling.params import ReasoningMarks, SamplingParams
from winnow.sampling.stops import StopCutter
from winnow.sampling.token_table import Tokenizer, TokenTable

# Tokens of a prompt that surely hold its last character: it may take four byte tokens.
_CONTEXT = 6


class Detokenizer:
    """The text that each further token adds: bytes of tokens, decoded as far as characters are whole.

    Model output need not be UTF-8 at all: each broken part of it becomes a replacement character. An answer may finish
    a character that the prompt began; one that it does not finish is none of its text.

    Attributes:
        at_start: nothing stands before the next token's text, neither of the prompt nor of the answer.
    """

    def __init__(self, table: TokenTable, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        self._skipped = table.special if skip_special_tokens else {}
        self.at_start = all(token in self._skipped for token in prompt_token_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt_token_ids[-_CONTEXT:]:
            if token not in self._skipped:
                self._decoder.decode(table.bytes_of(token))
        self._of_prompt = bool(self._pending)

    @property
    def _pending(self) -> bytes:
        return self._decoder.getstate()[0]

    def push(self, token_id: int) -> str:
        """Return the text that is certain now and was not before."""
        if token_id in self._skipped:
            return ""
        own = self._table.bytes_of(token_id, self.at_start)
        self.at_start = False
        if not self._of_prompt:
            return self._decoder.decode(own)
        pending, text = self._pending, self._decoder.decode(own)
        if not text:
            return text
        self._of_prompt = False
        is_finished = (pending + own).startswith(text[0].encode())
        return text if is_finished else text[len(pending.decode(errors="replace")) :]

    def flush(self) -> str:
        """Return what was still uncertain: the replacement of an incomplete character."""
        text = self._decoder.decode(b"", final=True)
        of_prompt, self._of_prompt = self._of_prompt, False
        return "" if of_prompt else text


class ReasoningSplitter:
    """Splitter of growing text into reasoning, with its marks and the white space behind it, and what follows.

    Attributes:
        ended: all further text is the answer's own.
        num_tokens: tokens of the reasoning so far, its marks included; 0 where there is none.
    """

    def __init__(self, marks: ReasoningMarks) -> None:
        self.ended = False
        self.num_tokens = 0
        self._opening, self._closing = marks
        self._inside = not self._opening
        self._behind = False
        self._held = ""  # it may be the opening mark, or the beginning of the closing one that was given out
        self._pushed = 0

    def push(self, text: str) -> tuple[str, str]:
        """Read on by a token. Returns the text that is reasoning, and the text that is not."""
        self._pushed += 1
        given = ""
        if not self._inside and not self._behind:
            self._held += text
            begin = self._held.lstrip()
            if not begin.startswith(self._opening):
                if self._opening.startswith(begin):
                    return "", ""
                return "", self.finish()
            start = len(self._held) - len(begin) + len(self._opening)
            given, text = self._held[:start], self._held[start:]
            self._held, self._inside = "", True
        if self._inside:
            self.num_tokens = self._pushed
            seen = self._held + text
            end = seen.find(self._closing)
            if end < 0:
                self._held = seen[max(0, len(seen) - len(self._closing) + 1) :]
                return given + text, ""
            end += len(self._closing) - len(self._held)
            given, text = given + text[:end], text[end:]
            self._held, self._inside, self._behind = "", False, True
        rest = text.lstrip()
        self.ended = bool(rest)
        return given + text[: len(text) - len(rest)], rest

    def finish(self) -> str:
        """Return what was held back, which is none of the reasoning: no mark follows."""
        held = "" if self._inside else self._held
        self._held, self.ended = "", not self._inside
        return held


class TextStream:
    """The text of one answer as it grows, cut at the first stop string; without a tokenizer it stays empty.

    Of text that could still change nothing is shown: neither a character whose bytes are incomplete nor an ending that
    could become a stop string. With a prompt, the text is what the tokenizer writes after the prompt, a leading space
    included; without, what it writes for the answer alone.

    A stop string that holds the text of a special token ends the answer also where special tokens are left out of the
    text. Within reasoning, and in white space behind it, none does.

    Attributes:
        is_complete: `until` says so.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | TokenTable | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = None
        self._reasoning = None if params.reasoning is None else ReasoningSplitter(params.reasoning)
        stops, include = tuple(params.stop or ()), params.include_stop_str_in_output
        self._hidden: dict[int, str] = {}  # texts of tokens that only stop strings see
        if tokenizer is not None and params.detokenize:
            table = tokenizer if isinstance(tokenizer, TokenTable) else TokenTable(tokenizer)
            self._detokenizer = Detokenizer(table, params.skip_special_tokens, prompt_token_ids)
            special = table.special if stops and params.skip_special_tokens else {}
            self._hidden = {
                token: text for token, text in special.items() if any(text in stop for stop in stops)
            }
        self._cutter = StopCutter(stops, include, self._hidden.values())
        self._pieces: list[str] = []
        self._taken = 0  # pieces given out
        self._end = None if params.until is None else params.until()
        self.is_complete = False
        self._check_stop = True

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text. Tokens pushed after it are ignored."""
        return self._cutter.matched

    @property
    def reasoning_tokens(self) -> int:
        """Number of the tokens so far that are reasoning, its marks included."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    @property
    def at_start(self) -> bool:
        """See `Detokenizer.at_start`."""
        return self._detokenizer is not None and self._detokenizer.at_start

    @property
    def text(self) -> str:
        """All text that is certain so far: what `take_delta` has given and would give now."""
        return "".join(self._pieces)

    def push(self, token_id: int, check_stop: bool = True) -> None:
        """Add a token. Without `check_stop`, as before `min_tokens` is reached, a stop string that ends in this token's
        text is ignored."""
        if self._detokenizer is None or self.matched_stop is not None:
            return
        self._check_stop = check_stop
        text = self._detokenizer.push(token_id)
        if self._reasoning is not None and not self._reasoning.ended:
            thought, text = self._reasoning.push(text)
            self._settle(thought)
            if not self._reasoning.ended:
                return
        self._settle(self._cutter.feed(text, check_stop))
        if token_id in self._hidden and self.matched_stop is None:
            self._settle(self._cutter.feed(self._hidden[token_id], check_stop, shown=False))

    def take_delta(self) -> str:
        """Return the text that became certain since the last call."""
        delta = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return delta

    def finish(self) -> None:
        """Release what was held back: no token will follow."""
        if self._detokenizer is None or self.matched_stop is not None:
            return
        text = self._detokenizer.flush()
        check = self._check_stop
        if self._reasoning is not None:
            text = self._reasoning.finish() + text
            check = check and self._reasoning.ended
        self._settle(self._cutter.feed(text, check))
        self._settle(self._cutter.finish())

    def _settle(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            if self._end is not None and self._end.completes(text):
                self.is_complete = True
