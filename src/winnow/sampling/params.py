"""Sampling parameters of a request, checked when they are created."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, Protocol, Self, get_args

from winnow.errors import InvalidRequestError
from winnow.sampling import list_params
from winnow.sampling.list_params import MAX_LOGIT_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS, require
from winnow.sampling.structured import StructuredOutputs
from winnow.values.checks import Limits, parameter
from winnow.values.eviction_request import AUTO, Amount, EvictionRequest, check_one_amount
from winnow.values.foreign_names import accept_fields
from winnow.values.reuse import REUSES
from winnow.vllm import names as vllm_names

MAX_N = 128
MAX_LOGPROBS = 64
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0  # of presence_penalty and frequency_penalty, either sign
MAX_SEED = 2**63 - 1
GREEDY_TEMPERATURE = 1e-5  # anything colder is greedy: dividing by it would leave float32


class RequestOutputKind(IntEnum):
    """Kind of the outputs of an unfinished request, as in vLLM: the answer so far, what is new of it, or none."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class AnswerEnd(Protocol):
    def completes(self, text: str) -> bool:
        """Read on. Returns whether the answer is complete with this text."""


class ReasoningMarks(NamedTuple):
    """Marks around the reasoning of one answer."""

    opening: str  # empty: the prompt ends within the reasoning
    closing: str


READERS = ("reasoning", "until")
"""Fields that readers of answers set."""
_ALIASES = {"max_completion_tokens": "max_tokens"}  # OpenAI's newer name


@accept_fields(vllm_names.SAMPLING, InvalidRequestError, "sampling parameter")
@dataclass(frozen=True)
class SamplingParams(EvictionRequest):
    """Choice of the tokens of one request, of its end, and of what is reported about them. Names as in vLLM.

    What it asks of eviction are the fields of `EvictionRequest`. A field may be assigned to, which checks all of them
    again; a request that was made before keeps what it had.

    Attributes:
        n: answers per prompt, sampled independently (`sample_index` 0 to n - 1).
        temperature: divides the logits; below 1e-5 the most probable token is taken (greedy).
        top_p: keep the fewest most probable tokens whose probabilities sum to at least this.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        min_p: drop tokens less probable than this share of the most probable one.
        repetition_penalty: above 1 discourages tokens of the prompt and the answer (divides positive logits,
            multiplies negative ones; Keskar et al., CTRL, 2019, section 4.1).
        presence_penalty: subtracted from the logit of every token that the answer already holds.
        frequency_penalty: subtracted as many times as the answer holds the token.
        logit_bias: token id -> added to its logit.
        seed: same seed, same prompt, same answer, whatever else runs. None or -1: drawn from the engine's seed.
        stop: text that ends the answer, one string or several; stored as a tuple.
        stop_token_ids: tokens that end the answer; stored as a tuple. None is read as none.
        bad_words: texts that the answer does not hold, in the tokens that the tokenizer makes of them with and without
            a space in front; stored as a tuple. The engine takes lists of token ids too.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: continue after the model's end-of-sequence token.
        min_tokens: tokens before which nothing ends the answer.
        max_tokens: most tokens of an answer; None: up to the model's limit.
        logprobs: how many of the most probable tokens to report beside the sampled one; None: report nothing.
        prompt_logprobs: the same for each token of the prompt.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text at all.
        forced_tokens: tokens that the answer begins with in place of sampled ones, one list for all samples, or a list
            of n lists. Each takes a decoding step of its own, with the rounds of eviction that fall there, and its
            logprob is the model's. Nothing ends the answer before the last of them; `max_tokens` counts them.
        structured_outputs: the form of the answer: a JSON schema, a regular expression, a choice or a grammar, as a
            `StructuredOutputs` or a mapping of its fields.
        reasoning: marks around the reasoning that the answer may begin with, the opening one empty where the prompt
            ends within it. `stop` acts behind it, and its tokens are counted. Readers of chats set it; requests cannot.
        until: opens what reads the answer's text and says when it is complete; set as `reasoning` is.
        reuse: what the prompt takes of KVs that others computed, one of `winnow.values.reuse.REUSES`; None: as the
            engine's. With documents and anywhere answers are approximate.
        output_kind: what a request that is stepped or streamed returns before its end, a `RequestOutputKind`.

    Raises:
        InvalidRequestError: a field is of the wrong type, not finite or out of range; names field, value and limit.
    """

    n: int = parameter(1, Limits(1, MAX_N))
    temperature: float = parameter(1.0, Limits(0, MAX_TEMPERATURE))
    top_p: float = parameter(1.0, Limits(0, 1, open=True))
    top_k: int = parameter(0, Limits(-1))
    min_p: float = parameter(0.0, Limits(0, 1))
    repetition_penalty: float = parameter(1.0, Limits(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY))
    presence_penalty: float = parameter(0.0, Limits(-MAX_PENALTY, MAX_PENALTY))
    frequency_penalty: float = parameter(0.0, Limits(-MAX_PENALTY, MAX_PENALTY))
    logit_bias: Mapping[int, float] | None = parameter(None, most=MAX_LOGIT_BIAS_ENTRIES, hash=False)
    seed: int | None = parameter(None, Limits(-MAX_SEED, MAX_SEED))
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = parameter((), Limits(0), MAX_STOP_TOKEN_IDS)
    bad_words: str | Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = parameter(0, Limits(0))
    max_tokens: int | None = parameter(16, Limits(1))
    logprobs: int | None = parameter(None, Limits(0, MAX_LOGPROBS))
    prompt_logprobs: int | None = parameter(None, Limits(0, MAX_LOGPROBS))
    skip_special_tokens: bool = True
    detokenize: bool = True
    forced_tokens: Sequence[int] | Sequence[Sequence[int]] = parameter((), Limits(0))
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = parameter(None, hash=False)
    reasoning: ReasoningMarks | None = None
    until: Callable[[], AnswerEnd] | None = field(default=None, hash=False, repr=False)
    reuse: str | None = None
    output_kind: int = parameter(RequestOutputKind.CUMULATIVE, Limits(0, 2))

    def __post_init__(self) -> None:
        for name, kinds, limits in _scalars():
            self._store(name, _scalar(name, getattr(self, name), kinds, limits))
        if self.seed == -1:
            self._store("seed", None)
        most, limit = self.max_tokens, f"at most max_tokens ({self.max_tokens})"
        require(most is None or self.min_tokens <= most, "min_tokens", limit, self.min_tokens)
        require(self.reuse in (None, *REUSES), "reuse", f"one of {', '.join(REUSES)}", self.reuse)
        self._store("stop", list_params.stop_strings(self.stop))
        self._store("stop_token_ids", list_params.stop_token_ids(self.stop_token_ids))
        self._store("logit_bias", list_params.logit_bias(self.logit_bias))
        self._store("bad_words", list_params.bad_words(self.bad_words))
        self._store("protect", list_params.spans(self.protect))
        self._store("forced_tokens", list_params.forced_tokens(self.forced_tokens, self.n))
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            self._store("structured_outputs", StructuredOutputs.from_mapping(self.structured_outputs))
        for name in () if self.structured_outputs is None else ("ignore_eos", "forced_tokens"):
            if getattr(self, name):
                raise InvalidRequestError(
                    f"{name} cannot be given with structured_outputs, which say when the answer ends"
                )
        require(most is None or self.num_forced <= most, "forced_tokens", limit, self.num_forced)
        self._store_amount("compression")
        self._store_amount("kv_budget")
        check_one_amount(self.compression, self.kv_budget, InvalidRequestError)
        require(self.detokenize or not self.stop, "detokenize", "true where stop is given", False)

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _store_amount(self, name: str) -> None:
        """Check an amount that is one number for all samples, or a list of one each."""
        value, declared = getattr(self, name), self.__dataclass_fields__[name]
        if value is None or (name == "compression" and value == AUTO):
            return
        kinds, limits = {int, float} & {*get_args(declared.type)}, declared.metadata["limits"]
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            self._store(name, _scalar(name, value, kinds, limits))
            return
        require(len(value) == self.n, name, f"one number, or one for each of the n = {self.n} samples", value)
        checked = tuple(_scalar(name, each, kinds, limits) for each in value)
        self._store(name, checked if len(checked) > 1 else checked[0])

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Return parameters from JSON-like input.

        Null stands for the default, except in `max_tokens`, where it means the model's limit. `logit_bias` may have its
        token ids as strings, the only keys that JSON knows. `max_completion_tokens` is read as `max_tokens`. Raises
        InvalidRequestError: an unknown field, a field and its alias together, or a bad value.
        """
        for name in READERS:
            if name in values:
                raise InvalidRequestError(f"{name} is not taken from requests: the model's answers are read")
        known = {each.name for each in fields(cls)}
        chosen: dict[str, Any] = {}
        for key, value in values.items():
            name = _ALIASES.get(key, key)
            if name != key and name in values:
                raise InvalidRequestError(f"{key} and {name} mean the same, give one; got both")
            if name == "logit_bias" and isinstance(value, Mapping):
                value = {list_params.token_key(token): bias for token, bias in value.items()}
            if value is not None or name not in known or name == "max_tokens":
                chosen[name] = value
        return cls(**chosen)

    @property
    def amounts(self) -> tuple[Amount, ...]:
        """Amounts of KVs that are asked for: none, one for all samples, or one for each."""
        for name in ("compression", "kv_budget"):
            value = getattr(self, name)
            if value not in (None, AUTO):
                values = value if isinstance(value, tuple) else (value,)
                return tuple(Amount(**{name: each}) for each in values)
        return ()

    @property
    def is_greedy(self) -> bool:
        """Return whether the most probable token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def form(self) -> StructuredOutputs | None:
        """The form of the answer, as it was read."""
        form = self.structured_outputs
        assert form is None or isinstance(form, StructuredOutputs), "mappings are read before"
        return form

    def with_bad_tokens(self, encode: Callable[[str], Sequence[int]]) -> Self:
        """Return the same parameters with the tokens of `bad_words`, each as it is cut alone and behind a space."""
        words = [word for word in self.bad_words or () if isinstance(word, str)]
        if not words:
            return self
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        tokens: Any = tuple(dict.fromkeys(ids for text in texts if (ids := tuple(encode(text)))))
        return replace(self, bad_words=tokens)

    @property
    def bad_tokens(self) -> list[tuple[int, ...]]:
        """The tokens of `bad_words`, once they were cut."""
        words: Any = self.bad_words
        return [word for word in words if isinstance(word, tuple)]

    def forced_for(self, sample_index: int) -> tuple[int, ...]:
        """Return the tokens that this sample's answer begins with."""
        forced: Any = self.forced_tokens
        return forced[sample_index] if forced and isinstance(forced[0], tuple) else forced

    @property
    def num_forced(self) -> int:
        """The most tokens that are forced upon a sample."""
        return max(len(self.forced_for(sample)) for sample in range(self.n))

    def validate_for(self, vocab_size: int) -> None:
        """Check every token id against the vocabulary. Raises InvalidRequestError: an id of `logit_bias`,
        `stop_token_ids` or `forced_tokens` is `vocab_size` or more."""
        named: list[tuple[str, Iterable[int]]] = [
            ("logit_bias", self.logit_bias or ()),
            ("bad_words", [token for word in self.bad_tokens for token in word]),
            ("stop_token_ids", self.stop_token_ids),
            *(("forced_tokens", self.forced_for(sample)) for sample in range(self.n)),
        ]
        for name, ids in named:
            largest = max(ids, default=0)
            if largest >= vocab_size:
                raise InvalidRequestError(
                    f"{name} must hold token ids below {vocab_size}, the vocabulary's size, got {largest}"
                )


def _assign(params: SamplingParams, name: str, value: Any) -> None:
    vars(params).update(vars(replace(params, **{name: value})))


# Frozen, so that they are hashable and static checks find what the engine would change; users may, as in vLLM.
SamplingParams.__setattr__ = _assign  # type: ignore[method-assign, assignment]


@cache
def _scalars() -> tuple[tuple[str, Set[Any], Limits | None], ...]:
    """Return the parameters that are one number or a switch: name, types, limits."""
    found = []
    for each in fields(SamplingParams):
        kinds = {*get_args(each.type)} if isinstance(each.type, UnionType) else {each.type}
        if kinds <= {int, float, bool, NoneType}:
            found.append((each.name, kinds, each.metadata.get("limits")))
    return tuple(found)


def _scalar(name: str, value: Any, kinds: Set[Any], limits: Limits | None) -> Any:
    if value is None and NoneType in kinds:
        return None
    if limits is None:
        require(isinstance(value, bool), name, "true or false", value)
        return value
    if int in kinds:
        return list_params.integer(name, value, int(limits.low), int(limits.high))
    checked = list_params.number(name, value, limits.low, limits.high)
    require(not limits.open or checked != limits.low, name, f"greater than {limits.low}", checked)
    return checked
