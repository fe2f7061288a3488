"""One cell, once: requests through the engine, and what came of them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.papers.kv_compress.grid import Cell
from benchmarks.papers.kv_compress.prompts import TimedPrompt
from winnow.llm import LLM
from winnow.outputs import EngineStats, RequestOutput
from winnow.sampling import SamplingParams

OnStep = Callable[[Cell, int, EngineStats], None]
"""Is told how many requests of the cell are done, after every step."""


@dataclass(frozen=True)
class Run:
    """What one run of a cell came to."""

    seconds: float
    total_tokens: int
    """Of all prompts and answers."""
    decoding_steps: int
    """Steps in which at least one request got a token."""
    mean_batch: float
    """Requests that got a token, over those steps."""
    most_batch: int
    """The largest decoding batch that was reached."""
    preemptions: int
    rounds: int
    """Of eviction, each over one or more requests."""
    kv_bytes_peak: int
    """Most KV memory in use between two steps."""
    parts: dict[str, float]
    """Seconds by part of the step: schedule, evict, execute, output."""
    reached: float
    """Tokens for each KV held in a row at the end of an answer, mean over the requests."""
    scores: tuple[float, ...]
    """Of the answers, in the order of the prompts; empty for random tokens."""

    @property
    def total_rate(self) -> float:
        """Tokens of prompts and answers per second."""
        return self.total_tokens / self.seconds

    @property
    def accuracy(self) -> float | None:
        """Mean score; None where there is nothing to score."""
        return statistics.fmean(self.scores) if self.scores else None


def run_cell(llm: LLM, cell: Cell, prompts: Sequence[TimedPrompt], new_tokens: int, on_step: OnStep) -> Run:
    """Answer all prompts at once, greedily, each with exactly `new_tokens` tokens.

    Raises:
        InvalidRequestError: a request does not fit into the model's context or the KV memory.
    """
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1 if cell.prefill_only else new_tokens,
        ignore_eos=True,
        detokenize=False,
        **cell.options,
    )
    before = llm.stats()
    start = time.perf_counter()
    ids = [llm.submit(prompt.token_ids, params) for prompt in prompts]
    finished: dict[str, RequestOutput] = {}
    batches: list[int] = []
    peak = 0
    while llm.has_unfinished:
        outputs = llm.step()
        if outputs:
            batches.append(len(outputs))
        finished |= {output.request_id: output for output in outputs if output.finished}
        stats = llm.stats()
        peak = max(peak, stats.kv_bytes_used)
        on_step(cell, len(finished), stats)
    seconds = time.perf_counter() - start
    after = llm.stats()
    for output in finished.values():
        output.raise_for_error()
    answers = [finished[request_id].outputs[0] for request_id in ids]
    assert all(len(answer.token_ids) == params.max_tokens for answer in answers), "an answer is short"
    reports = [answer.eviction for answer in answers]
    graded = [
        prompt.score(answer.token_ids, llm.tokenizer) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return Run(
        seconds=seconds,
        total_tokens=sum(len(prompt.token_ids) for prompt in prompts)
        + sum(len(answer.token_ids) for answer in answers),
        decoding_steps=len(batches),
        mean_batch=statistics.fmean(batches),
        most_batch=max(batches),
        preemptions=after.num_preemptions - before.num_preemptions,
        rounds=after.num_rounds - before.num_rounds,
        kv_bytes_peak=peak,
        parts={part: after.elapsed[part] - before.elapsed.get(part, 0.0) for part in after.elapsed},
        reached=statistics.fmean(1.0 if report is None else report.compression for report in reports),
        scores=() if cell.prefill_only else tuple(round(each, 4) for each in graded if each is not None),
    )
