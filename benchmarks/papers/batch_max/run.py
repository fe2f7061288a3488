"""Requests through the engine, and where their time went."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.papers.batch_max.methods import Method
from winnow.llm import LLM

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
    first = before = llm.stats()
    computing = {"prefill": 0.0, "decode": 0.0}
    most_running = kv_bytes = 0
    waited: bool | None = None
    start = time.perf_counter()
    for prompt in prompts:
        llm.submit(list(prompt), params, final_only=True)
    while llm.has_unfinished:
        ended = 0
        for output in llm.step():
            output.raise_for_error()
            ended += 1
        stats = llm.stats()
        part = "prefill" if stats.prompt_tokens > before.prompt_tokens else "decode"
        computing[part] += stats.elapsed["execute"] - before.elapsed["execute"]
        most_running = max(most_running, stats.num_running + ended)
        kv_bytes = max(kv_bytes, stats.kv_bytes_used)
        if waited is None:
            waited = stats.num_waiting > 0
        before = stats
    seconds = time.perf_counter() - start
    evict = before.elapsed["evict"] - first.elapsed["evict"]
    return Run(
        requests=len(prompts),
        new_tokens=new_tokens,
        seconds=seconds,
        **computing,
        evict=evict,
        host=seconds - sum(computing.values()) - evict,
        steps=before.num_steps - first.num_steps,
        rounds=before.num_rounds - first.num_rounds,
        most_running=most_running,
        waited=bool(waited),
        preemptions=before.num_preemptions - first.num_preemptions,
        kv_bytes=kv_bytes,
    )
