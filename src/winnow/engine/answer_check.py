"""What compression costs in answers: some of them are computed from all KVs too, while nothing else is to be done."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from winnow.config import FULL
from winnow.engine.requests.new_request import NewRequest
from winnow.engine.requests.request import Sequence
from winnow.outputs import AgreementRecord
from winnow.values.eviction_request import EVICTION_FIELDS, EvictionRequest
from winnow.values.reuse import EXACT

_LEAST = 4
_MOST_WAITING = 64
_WHOLE: dict[str, Any] = {name: getattr(EvictionRequest(), name) for name in EVICTION_FIELDS} | {
    "eviction": FULL
}


class AnswerCheck:
    """Choice of answers under a policy, `share` of them and at least 4, each as likely as any other, to be
    compared with the full cache's; and what came of it.

    The tokens of an answer are proposed to a request that keeps every KV, as drafts are: it samples them, many in a
    step, as long as it would have given them itself. So they are compared exactly, up to the rounding of a step's
    numbers, with all that its parameters ask for, at the price of a prompt. Draws take the same random numbers, so that
    drawn tokens differ by what was evicted alone.
    """

    def __init__(self, share: float, seed: int) -> None:
        self.record = AgreementRecord()
        self._share, self._random = share, Random(seed)  # noqa: S311  # no secret
        self._num_known = self._num_taken = 0
        self._waiting: list[NewRequest] = []

    def note(self, sequence: Sequence) -> None:
        """Take an answer that has ended by itself into the choice, if rounds took KVs from it."""
        request, answer = sequence.request, sequence.output_token_ids
        params, ages = request.params, request.session is not None and request.session.ages
        ended = sequence.finish_reason in ("stop", "length") and sequence.index == 0 and answer
        if not (self._share and ended and sequence.rounds.rounds) or params.forced_tokens or ages:
            return
        self._num_known += 1
        wanted = max(_LEAST, self._share * self._num_known)
        is_new = self._num_taken + len(self._waiting) + 1 <= wanted and len(self._waiting) < _MOST_WAITING
        if not is_new and self._random.random() * self._num_known >= len(self._waiting):
            return
        plain: dict[str, Any] = {"logprobs": None, "prompt_logprobs": None, **_WHOLE}
        least = min(params.min_tokens, len(answer))
        new = NewRequest(
            request.request_id,
            None,
            list(request.prompt_token_ids),
            replace(params, n=1, reuse=EXACT, max_tokens=len(answer), min_tokens=least, **plain),
            tenant=request.tenant,
            final_only=True,
            images=request.images,
            expected=tuple(answer),
        )
        if is_new:
            self._waiting.append(new)
        else:
            self._waiting[self._random.randrange(len(self._waiting))] = new

    def due(self, busy: Mapping[str, float], spent: Mapping[str, float], num_prompt_tokens: int) -> bool:
        """Return whether the next check fits into its share of the engine's time: seconds by part of a step, of
        requests and of checks."""
        if not self._waiting:
            return False
        tokens = len(self._waiting[0].token_ids) + len(self._waiting[0].expected)
        seconds = tokens * busy["prefill"] / max(num_prompt_tokens, 1)
        used, there = (sum(of[part] for part in ("schedule", "execute", "output")) for of in (spent, busy))
        return used + seconds <= self._share * there

    def take(self) -> NewRequest:
        self._num_taken += 1
        return self._waiting.pop(0)

    def compared(self, new: NewRequest, answer: tuple[int, ...], *, shares_prefixes: bool) -> None:
        """Count the tokens up to the first that the full cache writes otherwise. The rest comes next where prefixes are
        shared, so that it costs a step."""
        end, expected, record = len(answer), new.expected, self.record
        record.tokens += end
        record.agreed += sum(a == b for a, b in zip(answer, expected, strict=False))
        if not new.answered:
            record.checked += 1
            record.equal += answer == expected
            if answer != expected and len(record.lines) < record.MOST_LINES:
                record.lines.append(new.request_id)
        if shares_prefixes and 0 < end < len(expected):
            params, done = replace(new.params, max_tokens=len(expected) - end, min_tokens=0), expected[:end]
            rest = replace(new, token_ids=[*new.token_ids, *done], params=params, expected=expected[end:])
            self.put_back(replace(rest, answered=new.answered + end))

    def snapshot(self) -> AgreementRecord:
        """Return the record as it is now."""
        return replace(self.record, lines=list(self.record.lines), waiting=len(self._waiting))

    def put_back(self, new: NewRequest) -> None:
        """Take back what is left of a check: all of it where it gave way to a request."""
        self._num_taken -= 1
        self._waiting.insert(0, new)
