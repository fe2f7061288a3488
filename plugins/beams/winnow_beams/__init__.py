"""Beam search: a loop in front of an engine, over forks of its requests, which share what they have in common.

Tokens and scores are those of transformers' `generate` with `num_beams`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from winnow.engine_client import EngineClient
from winnow.errors import CapacityError, InvalidRequestError
from winnow.outputs import CompletionOutput
from winnow.prompt.prompts import Prompt
from winnow.sampling import SamplingParams
from winnow.sampling.params import MAX_LOGPROBS
from winnow.values.checks import check_integer, require


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of `beam_search`. Raises InvalidRequestError: a field is out of range; names field, value and limit.

    Attributes:
        beam_width: number of beams, and of answers.
        length_penalty: an answer's score is its logprob divided by its length to this power.
        early_stopping: True: the search ends with `beam_width` finished answers. False: it continues while the best
            beam, were it to end now, would be better than the worst of them; "never": while it still may become so.
        ignore_eos: continue after the model's end-of-sequence token.
        stop_token_ids: further tokens that end an answer.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            check_integer(name, getattr(self, name), 1, error=InvalidRequestError)
        early, known = self.early_stopping, "true, false or 'never'"
        require(early in (True, False, "never"), "early_stopping", known, early, InvalidRequestError)


class BeamAnswer(NamedTuple):
    score: float
    cum_logprob: float
    tokens: list[int]
    text: str | None


class BeamSearchOutput(NamedTuple):
    """The answers to a prompt, best first; the most bytes of blocks that the beams held together, and the bytes that as
    many requests of that length hold without sharing."""

    sequences: list[BeamAnswer]
    kv_bytes_peak: int
    kv_bytes_unshared: int


class _Beam(NamedTuple):
    request_id: str
    logprob: float
    tokens: list[int]


def beam_search(llm: EngineClient, prompt: Prompt, params: BeamSearchParams) -> BeamSearchOutput:
    """Search for the most probable answers to a prompt. Each step of the engine is one of the search.

    Raises:
        InvalidRequestError (or a subclass): prompt or parameters are invalid, or another request is unfinished.
        CapacityError: the beams do not run together, for want of KV memory or sequences.
        RequestFailedError: a beam failed while it was computed.
    """
    idle = not llm.has_unfinished
    require(idle, "engine", "idle for a beam search", "unfinished requests", InvalidRequestError)
    width, ends = (
        params.beam_width,
        {*params.stop_token_ids, *(() if params.ignore_eos else llm.eos_token_ids)},
    )
    each = max(2, 1 + len(ends))  # so that `width` beams remain whichever ends come first
    most = f"at most {MAX_LOGPROBS // each} with {len(ends)} tokens that end an answer"
    require(each * width <= MAX_LOGPROBS, "beam_width", most, width, InvalidRequestError)
    asked = SamplingParams(
        temperature=0.0, max_tokens=params.max_tokens, ignore_eos=True, logprobs=each * width
    )
    beams, finished = [_Beam(llm.submit(prompt, asked), 0.0, [])], list[BeamAnswer]()
    peak, unshared, may_improve, limit, length = 0, 0, True, params.max_tokens, 0
    try:
        while length < limit:
            length += 1
            prompt_len, answers = _advance(llm, beams, length)
            limit = min(limit, llm.max_model_len - prompt_len)
            if (held := llm.stats().kv_bytes_held) >= peak and length < limit:
                peak, unshared = held, len(beams) * llm.kv_bytes(prompt_len + length - 1)
            best = sorted(
                (-beam.logprob - entry.logprob, parent, token)
                for parent, (beam, answer) in enumerate(zip(beams, answers, strict=True))
                for token, entry in (answer.logprobs or [{}])[-1].items()  # type: ignore[union-attr]
            )[: each * width]
            for cost, parent, token in best[:width] if may_improve else ():
                if length == limit or token in ends:
                    tokens = [*beams[parent].tokens, token]
                    text = llm.tokenizer.decode(tokens, skip_special_tokens=True) if llm.tokenizer else None
                    finished.append(BeamAnswer(-cost / length**params.length_penalty, -cost, tokens, text))
            finished.sort(key=lambda answer: -answer.score)  # stable: the earlier one stays before its equals
            del finished[width:]
            chosen = [candidate for candidate in best if candidate[2] not in ends][:width]
            if len(finished) == width:
                may_grow = params.early_stopping == "never" and params.length_penalty > 0
                reachable = -chosen[0][0] / (limit if may_grow else length) ** params.length_penalty
                may_improve = reachable > finished[-1].score
                if params.early_stopping is True or not may_improve:
                    break
            if length < limit:
                beams[:] = _continue(llm, asked, beams, answers, chosen)
    finally:
        for beam in beams:
            llm.abort(beam.request_id)
    return BeamSearchOutput(finished, peak, unshared)


def _advance(llm: EngineClient, beams: list[_Beam], length: int) -> tuple[int, list[CompletionOutput]]:
    """Step until each beam has `length` tokens. Returns the length of the prompt, and the beams' answers."""
    answers, prompt_len = dict[str, CompletionOutput](), 0
    while len(answers) < len(beams):
        for output in llm.step():
            output.raise_for_error()
            prompt_len, [answer] = len(output.prompt_token_ids), output.outputs
            if answer.token_ids:
                answers[output.request_id] = answer
        if any(len(answer.token_ids) > length for answer in answers.values()):
            raise CapacityError(
                f"beam_width must be such that all beams run in each step: {len(beams)} beams need KV memory together, "
                f"and {len(beams) + 1} sequences (max_num_seqs)"
            )
    return prompt_len, [answers[beam.request_id] for beam in beams]


def _continue(
    llm: EngineClient,
    asked: SamplingParams,
    beams: list[_Beam],
    answers: list[CompletionOutput],
    chosen: list[tuple[float, int, int]],
) -> list[_Beam]:
    """Return the beams of the next step: forks with another last token, or requests whose own token was chosen."""
    names: dict[tuple[int, int], str] = {}
    # Those that nothing continues end first, so that forks find their slots and blocks.
    for parent in sorted(range(len(beams)), key=lambda parent: parent in {of for _, of, _ in chosen}):
        beam, sampled = beams[parent], answers[parent].token_ids[-1]
        names[parent, sampled] = beam.request_id
        wanted = [token for _, of, token in chosen if of == parent]
        for token in wanted:
            if token != sampled:
                forced = replace(asked, forced_tokens=[*beam.tokens, token])
                names[parent, token] = llm.fork(beam.request_id, forced)
        if sampled not in wanted:
            llm.abort(beam.request_id)
    return [_Beam(names[of, token], -cost, [*beams[of].tokens, token]) for cost, of, token in chosen]
