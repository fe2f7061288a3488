"""Requests through an engine, and what every step brought."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from winnow.errors import CapacityError, ContextLengthError
from winnow.llm import LLM
from winnow.outputs import EngineStats, RequestOutput
from winnow.sampling import SamplingParams

Tag = TypeVar("Tag")
OnStep = Callable[[int, EngineStats], None]
"""Called after every step with the number of requests that are done, and the engine's counters."""


@dataclass(frozen=True)
class Step:
    """Outputs and time of one step.

    Attributes:
        seconds: since the first submission.
        outputs: requests that got a token; with `final_only` those that ended.
    """

    seconds: float
    outputs: int
    finished: int
    submitted: int
    stats: EngineStats


@dataclass(frozen=True)
class Answered:
    """Requests with all their tokens: `outputs` in their order; `before`: the engine's counters before any."""

    before: EngineStats
    steps: tuple[Step, ...]
    outputs: tuple[RequestOutput, ...]
    refused: int = 0

    @property
    def seconds(self) -> float:
        return self.steps[-1].seconds

    @property
    def answers(self) -> list[Sequence[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]

    @property
    def running(self) -> tuple[int, ...]:
        """Sequences that held KVs, by step, of requests with `final_only`; those that ended with it held some, too."""
        return tuple(step.stats.num_running + step.outputs for step in self.steps)

    @property
    def kv_bytes_peak(self) -> int:
        return max(step.stats.kv_bytes_used for step in self.steps)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part of the step: schedule, evict, execute, output."""
        after = self.steps[-1].stats.elapsed
        return {part: after[part] - self.before.elapsed.get(part, 0.0) for part in after}

    def counted(self, counter: str) -> int:
        return int(getattr(self.steps[-1].stats, counter) - getattr(self.before, counter))


def fixed_length(tokens: int, **options: Any) -> SamplingParams:
    """Parameters of a greedy answer of exactly `tokens` tokens, past the end of text."""
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, **{"detokenize": False} | options
    )


def answer_all(
    llm: LLM,
    requests: Iterable[tuple[Sequence[int], SamplingParams]],
    on_step: OnStep = lambda done, stats: None,
    *,
    final_only: bool = False,
    arrivals: Sequence[float] = (),
    skip_refused: bool = False,
) -> Answered:
    """Submit all requests, at once or as they arrive, and step until each has `max_tokens` tokens.

    Args:
        requests: token ids and parameters, with `ignore_eos`.
        arrivals: of each, in seconds from now, ascending; empty: all at once.
        final_only: steps give no outputs of unfinished requests.
        skip_refused: leave out requests that can never fit.
    """
    before = llm.stats()
    steps: list[Step] = []
    finished: dict[str, RequestOutput] = {}
    asked: dict[str, int | None] = {}
    coming, refused = deque(requests), 0
    times = deque(arrivals or [0.0] * len(coming))
    assert len(times) == len(coming), "every request arrives once"
    start = time.perf_counter()
    while coming or llm.has_unfinished:
        while coming and times[0] <= time.perf_counter() - start:
            times.popleft()
            token_ids, params = coming.popleft()
            try:
                asked[llm.submit(list(token_ids), params, final_only=final_only)] = params.max_tokens
            except (CapacityError, ContextLengthError):
                if not skip_refused:
                    raise
                refused += 1
        if not llm.has_unfinished:
            if times:
                time.sleep(max(times[0] - (time.perf_counter() - start), 0.0))
            continue
        outputs = llm.step()
        for output in outputs:
            if output.finished:
                output.raise_for_error()
                finished[output.request_id] = output
        stats, now = llm.stats(), time.perf_counter() - start
        steps.append(Step(now, len(outputs), len(finished), len(asked), stats))
        on_step(len(finished) + refused, stats)
    answers = tuple(finished[request_id] for request_id in asked)
    answered = Answered(before, tuple(steps), answers, refused)
    assert list(map(len, answered.answers)) == list(asked.values()), (
        "an answer has not the length that was asked for"
    )
    return answered


def run_all(
    llm: LLM, submitted: Iterable[tuple[str, Tag]], on_step: Callable[[], None] = lambda: None
) -> Iterator[tuple[Tag, RequestOutput]]:
    """Submit requests, step until all have ended, and yield each output beside what stands beside its request's id.

    The engine's steps are taken here. What is left when this is stopped or refused is aborted.

    Args:
        submitted: submits as it is iterated over; of requests with `final_only`.
    """
    waiting: dict[str, Tag] = {}
    try:
        waiting.update(submitted)
        while waiting:
            for output in llm.step():
                if output.finished and output.request_id in waiting:
                    output.raise_for_error()
                    yield waiting.pop(output.request_id), output
            on_step()
    finally:
        for request_id in waiting:
            llm.abort(request_id)
