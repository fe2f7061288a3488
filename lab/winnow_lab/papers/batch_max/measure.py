"""Answers, their accuracy, their time, and how many prompts memory holds."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from winnow.errors import CapacityError, ConfigError
from winnow.llm import LLM
from winnow_lab.bench.answering import answer_all
from winnow_lab.papers.batch_max.methods import (
    CONTROL_RULE,
    EVICT_EVERY,
    EXTREME_DECODES,
    Method,
    batch_max,
)
from winnow_lab.papers.judged import TimedPrompt, judge

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Run:
    """Requests that were all submitted at once, answered to the last of `new_tokens`.

    Seconds of `prefill` and `decode` are those of computing steps with and without prompt tokens, `evict` those of
    rounds; `host` is all else: scheduling, handing out, submitting.
    """

    requests: int
    new_tokens: int
    seconds: float
    prefill: float
    decode: float
    evict: float
    host: float
    steps: int
    rounds: int
    most_running: int
    waited: bool
    """Whether a request found no room in the first step."""
    preemptions: int
    kv_bytes: int
    """Most bytes of the KV cache in use after a step, tables included."""

    @property
    def rate(self) -> float:
        """New tokens per second, prefill included."""
        return self.requests * self.new_tokens / self.seconds

    @property
    def together(self) -> bool:
        """Whether all requests held their KVs side by side from the first step to the last: memory sufficed."""
        return not self.waited and self.preemptions == 0

    def to_json(self) -> dict[str, Any]:
        """The fields by name, and what follows from them."""
        return asdict(self) | {"rate": self.rate, "together": self.together}


def run_requests(llm: LLM, prompts: Prompts, method: Method, new_tokens: int) -> Run:
    """Submit all prompts at once and step until the last answer has all its tokens.

    Raises:
        CapacityError: a prompt could not be answered even alone.
    """
    params = method.params(new_tokens, to_the_end=True)
    done = answer_all(llm, [(prompt, params) for prompt in prompts], final_only=True)
    computing = {"prefill": 0.0, "decode": 0.0}
    for before, after in pairwise((done.before, *(step.stats for step in done.steps))):
        part = "prefill" if after.prompt_tokens > before.prompt_tokens else "decode"
        computing[part] += after.elapsed["execute"] - before.elapsed["execute"]
    evict = done.parts["evict"]
    return Run(
        requests=len(prompts),
        new_tokens=new_tokens,
        seconds=done.seconds,
        **computing,
        evict=evict,
        host=done.seconds - sum(computing.values()) - evict,
        steps=done.counted("num_steps"),
        rounds=done.counted("num_rounds"),
        most_running=max(step.stats.num_running + step.outputs for step in done.steps),
        waited=done.steps[0].stats.num_waiting > 0,
        preemptions=done.counted("num_preemptions"),
        kv_bytes=done.kv_bytes_peak,
    )


WAVE = 12
"""Prompts that are asked together before the scores are looked at."""


@dataclass(frozen=True)
class Accuracy:
    """Scores of the first prompts of a task, all of them unless a bar could no longer be reached."""

    scores: tuple[float, ...]
    asked: int
    """Prompts of the task."""

    @property
    def complete(self) -> bool:
        return len(self.scores) == self.asked

    @property
    def mean(self) -> float:
        """Of the scores that are there."""
        return statistics.fmean(self.scores)

    @property
    def best_possible(self) -> float:
        """The mean if every prompt that was not asked were answered right."""
        return (sum(self.scores) + self.asked - len(self.scores)) / self.asked

    def error_beside(self, other: "Accuracy") -> float:
        """Standard error of the difference of two means over the same prompts."""
        differences = [mine - theirs for mine, theirs in zip(self.scores, other.scores, strict=False)]
        if len(differences) < 2:
            return math.nan
        return statistics.stdev(differences) / math.sqrt(len(differences))

    def to_json(self) -> dict[str, Any]:
        """Scores, and what follows from them."""
        return {"mean": self.mean, "complete": self.complete, "scores": list(self.scores)}


def measure_accuracy(
    llm: LLM,
    asks: Sequence[TimedPrompt],
    method: Method,
    bar: float = 0.0,
) -> Accuracy:
    """Ask all prompts; answers end as answers do.

    What a method keeps of a prompt does not depend on what else runs, so prompts need not be batched as when timed.

    Args:
        bar: stop once the mean can no longer reach it, however the other prompts are answered.
    """
    scores: list[float] = []
    accuracy = Accuracy((), len(asks))
    while not accuracy.complete and accuracy.best_possible >= bar:
        wave = asks[len(scores) : len(scores) + WAVE]
        params = [method.params(ask.asked.max_tokens, to_the_end=False) for ask in wave]
        outputs = llm.generate([list(ask.token_ids) for ask in wave], params)
        for ask, output in zip(wave, outputs, strict=True):
            output.raise_for_error()
            scores.append(judge(ask.asked, output.outputs[0].text))
        accuracy = Accuracy(tuple(scores), len(asks))
    return accuracy


def largest_that_holds(
    batches: Sequence[int], holds: Callable[[int], bool], guess: int | None = None
) -> int | None:
    """The largest of `batches`, ascending, for which `holds` is true; None: there is none.

    A larger batch leaves each prompt fewer KVs, so what holds is taken to hold at every smaller size, and what fails to
    fail at every larger one. The search asks `guess`, one of `batches` (left out: the one in the middle), then its
    neighbour, and halves what is left: a good guess costs two questions.
    """
    low, high = 0, len(batches)  # those before `low` hold, those from `high` on fail
    place = len(batches) // 2 if guess is None else batches.index(guess)
    step = 0
    while low < high:
        if holds(batches[place]):
            low, neighbour = place + 1, place + 1
        else:
            high, neighbour = place, place - 1
        place = neighbour if step == 0 and low <= neighbour < high else (low + high) // 2
        step += 1
    return batches[low - 1] if low else None


# The paper tried multiples of 128, and of 64 at the end.
KV_STEP = 64


class Room:
    """The KV memory of one engine, asked with the longest prompts there are.

    Args:
        llm: its steps must have room for all tokens that a batch brings at once.
        prompts: longest first.
    """

    def __init__(self, llm: LLM, prompts: Prompts, new_tokens: int) -> None:
        self._llm = llm
        self._prompts = prompts
        self._new_tokens = new_tokens

    def holds(self, batch: int, method: Method) -> bool:
        """Whether the engine takes `batch` prompts into one step, with room for all that their prompts will hold.

        It promises that room when it lets them in.
        """
        prompts = [self._prompts[number % len(self._prompts)] for number in range(batch)]
        params = method.params(self._new_tokens, to_the_end=True)
        ids: list[str] = []
        try:
            for prompt in prompts:
                ids.append(self._llm.submit(list(prompt), params))
            self._llm.step()
            return self._llm.stats().num_waiting == 0
        except CapacityError:
            return False
        finally:
            for request_id in ids:
                self._llm.abort(request_id)

    def first_batch_out_of_memory(self) -> int:
        """The paper's b0: the smallest batch that ED cannot hold.

        Raises:
            ConfigError: not even one prompt fits.
        """
        batch = 1
        while self.holds(batch, EXTREME_DECODES[0]):
            batch += 1
        if batch == 1:
            raise ConfigError(
                f"kv_memory must hold at least one prompt of {len(self._prompts[0])} tokens beside its answer"
            )
        return batch

    def most_kvs(self, batch: int) -> int | None:
        """The largest |kv|, a multiple of 64 below the longest prompt, at which Batch-Max holds `batch` prompts.

        By whatever rule: rows of all of them are equally long. None: there is no |kv| that leaves a KV behind.
        """
        stats = self._llm.stats()
        bytes_each = (stats.kv_bytes_budget - stats.kv_bytes_used) // batch
        kvs = (len(self._prompts[0]) - 1) // KV_STEP * KV_STEP
        while kvs > EVICT_EVERY and (
            self._llm.kv_bytes(kvs) > bytes_each or not self.holds(batch, batch_max(CONTROL_RULE, kvs))
        ):
            kvs -= KV_STEP
        return kvs if kvs > EVICT_EVERY else None
