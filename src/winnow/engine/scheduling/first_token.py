"""How long a request would wait for its first token, by what those before it still compute."""

from collections.abc import Collection
from heapq import heapify, heappush, heapreplace
from itertools import chain, islice

from winnow.engine.memory.memory import Memory
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.engine.scheduling.running import Running

_MEMORY = 0.9
"""Decay of the weight of a measurement with each later one."""
_SHORTEST = 1.0
"""Seconds; what was expected sooner says little of how late others come."""


class FirstTokens:
    """Expectation of first tokens: prompts at the measured speed of prompts, answers at that of the last steps.

    Where KV memory or slots are short, a waiting request takes the place of the running one that ends first, as far as
    its answer is expected to be as long as those before it. What requests waited longer than was expected of them, for
    another load of the machine or for preemptions, those behind them are expected to wait longer too.
    """

    def __init__(self, memory: Memory, waiting: WaitingQueue, running: Running) -> None:
        self._memory, self._waiting, self._running = memory, waiting, running
        self._step_seconds = 0.0
        self._expected = dict[str, float]()  # of requests without a first token
        self._lateness = 1.0

    def note_step(self, seconds: float) -> None:
        before = self._step_seconds or seconds
        self._step_seconds = _MEMORY * before + (1 - _MEMORY) * seconds
        self._learn()

    def num_held_up(self, names: Collection[str]) -> int:
        """Return answers of these requests that hold no KVs, and would get none if a step began now."""
        fitting = self._memory.num_fitting(self._waiting, self._running)
        held_up = islice(self._waiting, fitting, None)
        return sum(1 + len(each.forks) for each in held_up if each.request.request_id in names)

    def seconds(self, name: str | None = None) -> float:
        """Return the seconds until the first token of a waiting request, or of the last that waits, as expected; what
        was not measured counts as 0. What is expected of a request that is named is compared with what it waits."""
        running, fitting = self._running, self._memory.num_fitting(self._waiting, self._running)
        prompts = wait = sum(map(self._prompt_seconds, running))
        ends = [prompts + self._rest(each) for each in running]  # of answers, when places come free
        heapify(ends)
        own = 0.0
        for number, each in enumerate(self._waiting):
            own = self._prompt_seconds(each)
            if number < fitting or not ends:
                prompts = wait = prompts + own
                heappush(ends, wait + self._rest(each))
            else:
                wait = max(ends[0], prompts) + own
                heapreplace(ends, wait + self._rest(each))
            if each.request.request_id == name:
                self._expected[name] = wait
                break
        return own + (wait - own) * self._lateness

    def _learn(self) -> None:
        """Take up how late first tokens came: more at once, less by and by."""
        if not self._expected:
            return
        left = dict[str, float]()
        for request in (each.request for each in chain(self._running, self._waiting)):
            if (expected := self._expected.pop(request.request_id, None)) is None:
                continue
            if (seconds := request.metrics.time_to_first_token) is None:
                left[request.request_id] = expected
            else:
                ratio = seconds / max(expected, _SHORTEST)
                mean = _MEMORY * self._lateness + (1 - _MEMORY) * ratio
                self._lateness = max(ratio, mean, 1.0)
        self._expected = left

    def _prompt_seconds(self, sequence: Sequence) -> float:
        left = max(sequence.prompt_len - sequence.kv.num_computed, 0)
        return self._memory.recompute_seconds(left) or 0.0

    def _rest(self, sequence: Sequence) -> float:
        """Return the seconds until a sequence's answer ends, once its prompt is computed."""
        done, usual = sequence.num_output_tokens, self._running.mean_answer
        most = sequence.request.max_tokens - done
        # One that is as long as others were, and has not ended, is expected to become twice as long.
        left = most if usual is None else min(most, usual - done if done < usual else done)
        return left * self._step_seconds
