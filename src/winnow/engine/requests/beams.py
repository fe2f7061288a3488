"""Beam search: which continuations of a request's beams go on, and which are answers. No cache, no model.

The rules are those of transformers' `generate` with `num_beams`, so that tokens and scores are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from winnow.errors import InvalidRequestError
from winnow.outputs import LogprobDict
from winnow.sampling import SamplingParams
from winnow.sampling.params import MAX_LOGPROBS


class Hypothesis(NamedTuple):
    """An answer that has ended."""

    score: float
    """Its logprob over its length to the power of the length penalty."""
    logprob: float
    token_ids: list[int]


class Continuation(NamedTuple):
    """A beam of the next step."""

    parent: int
    token: int
    logprob: float


@dataclass
class BeamSearch:
    """The beams of one request. A beam is named by the index of its sequence.

    Attributes:
        width: number of beams.
        ends: tokens that end an answer.
        params: what the executor samples the beams by, so that it reports enough candidates.
        logprobs: of the answer so far, by beam.
        finished: the best answers that have ended, best first, at most `width`.
    """

    width: int
    ends: frozenset[int]
    length_penalty: float
    early_stopping: bool | str
    max_tokens: int
    params: SamplingParams
    logprobs: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    finished: list[Hypothesis] = field(default_factory=list)
    num_tokens: int = 0
    _candidates: dict[int, LogprobDict] = field(default_factory=dict)
    _may_improve: bool = True

    @classmethod
    def of(cls, params: SamplingParams, max_tokens: int, eos_token_ids: frozenset[int]) -> "BeamSearch":
        """Start the search that parameters ask for.

        Raises:
            InvalidRequestError: the beams need more candidates than are reported.
        """
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        each = max(2, 1 + len(ends))
        if each * params.n > MAX_LOGPROBS:
            raise InvalidRequestError(
                f"n must be at most {MAX_LOGPROBS // each} with use_beam_search and {len(ends)} end tokens, "
                f"got {params.n}"
            )
        sampled = SamplingParams(n=params.n, temperature=0, seed=params.seed, logprobs=each * params.n)
        return cls(params.n, ends, params.length_penalty, params.early_stopping, max_tokens, sampled)

    @property
    def num_candidates(self) -> int:
        """Continuations to look at: enough for `width` of them to go on, whichever ends come first."""
        return self.params.logprobs or 0

    def offer(self, beam: int, candidates: LogprobDict) -> None:
        """Take in the most probable next tokens of a beam."""
        self._candidates[beam] = candidates

    def forget_candidates(self) -> None:
        """Forget the candidates: the beams will be computed again."""
        self._candidates.clear()

    @property
    def is_complete(self) -> bool:
        """Return whether all beams have their candidates."""
        return self._candidates.keys() == self.logprobs.keys()

    def select(self, answers: Mapping[int, Sequence[int]]) -> list[Continuation]:
        """Choose the beams of the next step; none: the search has ended, and `finished` is its result.

        Args:
            answers: the tokens of each beam's answer.
        """
        best = sorted(
            (
                Continuation(beam, token, self.logprobs[beam] + entry.logprob)
                for beam in sorted(self._candidates)
                for token, entry in self._candidates[beam].items()
            ),
            key=lambda each: (-each.logprob, each.parent, each.token),
        )[: self.num_candidates]
        self._candidates.clear()
        self.num_tokens += 1
        at_limit = self.num_tokens >= self.max_tokens
        for each in best[: self.width]:
            if (at_limit or each.token in self.ends) and self._may_improve:
                score = each.logprob / self.num_tokens**self.length_penalty
                self.finished.append(Hypothesis(score, each.logprob, [*answers[each.parent], each.token]))
        self.finished.sort(key=lambda each: -each.score)  # stable: the earlier one stays before its equals
        del self.finished[self.width :]
        going_on = [] if at_limit else [each for each in best if each.token not in self.ends]
        del going_on[self.width :]
        if not going_on or self._is_over(going_on[0].logprob):
            return []
        return going_on

    def _is_over(self, best_logprob: float) -> bool:
        """Return whether no beam may still become better than what has finished."""
        if len(self.finished) < self.width:
            return False
        if self.early_stopping is True:
            return True
        may_grow = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if may_grow else self.num_tokens
        self._may_improve = best_logprob / length**self.length_penalty > self.finished[-1].score
        return not self._may_improve

    def go_on(self, logprobs: dict[int, float]) -> None:
        """Continue with these sequences as the beams that were chosen."""
        self.logprobs = logprobs
