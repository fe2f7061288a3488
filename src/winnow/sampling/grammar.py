"""Forms of answers, compiled by llguidance: which tokens may come next."""

import json
from collections.abc import Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnow.errors import InvalidRequestError
from winnow.process.extras import install_hint
from winnow.sampling.structured import StructuredOutputs

_MAX_KEPT = 64
# Far above what a schema of an API needs, and reached within a second or two by one that was made to take forever.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "max_items_in_row": 2000,
}
# Models without much sense write white space forever where they may.
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}


class AnswerMatcher:
    """Matcher of one answer by llguidance's, which stands at the answer's start."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, bool [V]; none at all once the matcher has given up."""
        found = np.zeros(self._vocab_size, dtype=bool)
        if self._matcher.is_error():
            return found
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if not self._matcher.is_error():  # else a limit on its work was reached
            unpacked = np.unpackbits(bits, count=min(8 * len(bits), self._vocab_size), bitorder="little")
            found[: len(unpacked)] = unpacked
        return found

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)

    def take_all(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._matcher.consume_tokens(list(tokens))


class GrammarCompiler:
    """Compiler of forms for a tokenizer of transformers with a fast backend; None: no form can be compiled.
    Thread-safe; what was compiled last is kept."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._find = lru_cache(_MAX_KEPT)(self._compile)

    def check(self, form: StructuredOutputs) -> None:
        """Compile a form, so that the step that needs it need not. Raises InvalidRequestError: it cannot be compiled,
        or only with more work than is allowed."""
        self._find(form)

    def matcher(self, form: StructuredOutputs) -> AnswerMatcher:
        """Return a matcher at the start of an answer. Raises as `check`."""
        return AnswerMatcher(self._find(form).deep_copy(), self._vocab_size)

    def _compile(self, form: StructuredOutputs) -> Any:
        llguidance, tokenizer = _llguidance(), self._tokens
        try:
            limits = llguidance.LLParserLimits(**_LIMITS)
            matcher = llguidance.LLMatcher(tokenizer, _grammar(llguidance, form), log_level=0, limits=limits)
        except (ValueError, TypeError, RuntimeError) as error:
            raise _refused(error) from None
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return matcher

    @cached_property
    def _tokens(self) -> Any:
        llguidance = _llguidance()
        if self._tokenizer is None or not self._eos_token_ids:
            raise InvalidRequestError("structured_outputs need a model with a tokenizer and an end token")
        try:
            # Not by `llguidance.hf`, which takes transformers' own classes alone.
            backend = copy(self._tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            return llguidance.LLTokenizer(
                backend.to_str(), n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids)
            )
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise InvalidRequestError(
                f"structured_outputs cannot be served with this model's tokenizer: {error}"
            ) from None


def _grammar(llguidance: Any, form: StructuredOutputs) -> str:
    matcher = llguidance.LLMatcher
    grammar: str
    if form.regex is not None:
        grammar = matcher.grammar_from_regex(form.regex)
    elif form.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
        grammar = matcher.grammar_from_lark(f"start: {texts}")
    elif form.grammar is not None:
        lark = form.grammar
        if "::=" in lark and "start:" not in lark:  # as llama.cpp writes them
            from llguidance.gbnf_to_lark import any_to_lark

            lark = any_to_lark(lark)
        grammar = matcher.grammar_from_lark(lark)
    else:
        schema = form.json if form.json is not None else '{"type": "object"}'
        grammar = matcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    if form.before is None:
        return grammar
    is_lark = form.choice is not None or form.grammar is not None
    own = {"lark_grammar": grammar} if is_lark else json.loads(grammar)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": form.before}, {**own, "name": "form"}]})


def _refused(error: object) -> InvalidRequestError:
    message = " ".join(str(error).split())
    return InvalidRequestError(f"structured_outputs cannot be compiled: {message:.400}")


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise InvalidRequestError(
            f"structured_outputs need the package llguidance: {install_hint('structured')}"
        ) from None
    return llguidance
