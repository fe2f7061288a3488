"""One cell, once: queries through the engine, and what came of them."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.papers.baton.queries import Query
from winnow.llm import LLM
from winnow.outputs import EngineStats, RequestOutput
from winnow.padded.stats import PaddedStats
from winnow.sampling import SamplingParams

_TRACE_POINTS = 120
_DIGEST_BYTES = 4

OnStep = Callable[[int, EngineStats], None]
"""Is told how many queries are done, after every step."""


@dataclass(frozen=True)
class Trace:
    """How a run went on, at moments evenly spread over its steps: one entry for each of them."""

    seconds: tuple[float, ...]
    completed: tuple[int, ...]
    """Queries."""
    tokens: tuple[int, ...]
    """Of answers."""
    kv_bytes: tuple[int, ...]
    """In use by the engine, KVs of queries that wait in host memory included."""


@dataclass(frozen=True)
class Run:
    """What one run of a cell came to."""

    seconds: float
    """From the first submission to the last token: the paper's completion time."""
    answer_tokens: int
    prompt_tokens: int
    steps: int
    kv_bytes_peak: int
    """Most that was in use after a step, as in `Trace.kv_bytes`."""
    tally: dict[str, float]
    """The padded engine's counters (`winnow.padded.tally`), of this run alone; empty for the paged engine."""
    digests: tuple[str, ...]
    """Of each answer's token ids, in the order of the queries."""
    trace: Trace

    @property
    def idle_share(self) -> float | None:
        """Positions that were padding or belonged to nobody, of all computed; None for the paged engine."""
        return self.tally["idle"] / self.tally["positions"] if self.tally else None

    @property
    def column_share(self) -> float | None:
        """Columns held over the longest query's, summed over passes; None for the paged engine."""
        return self.tally["columns_held"] / self.tally["columns_needed"] if self.tally else None

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Run":
        """The run whose `asdict` gave `told`."""
        trace = Trace(**{name: tuple(values) for name, values in told["trace"].items()})
        return cls(**told | {"digests": tuple(told["digests"]), "trace": trace})


def run_cell(llm: LLM, queries: Sequence[Query], on_step: OnStep) -> Run:
    """Submit all queries at once, and take steps until every one is answered.

    Raises:
        InvalidRequestError: a query does not fit into the model's context or the KV memory.
    """
    _warm_up(llm, queries[0])
    before = _tally(llm.stats())
    first_step = llm.stats().num_steps
    moments: list[tuple[float, int, int, int]] = []
    finished: dict[str, RequestOutput] = {}
    tokens = 0
    start = time.perf_counter()
    ids = [llm.submit(list(query.token_ids), _params(query.answer_tokens)) for query in queries]
    while llm.has_unfinished:
        outputs = llm.step()
        tokens += len(outputs)
        finished |= {output.request_id: output for output in outputs if output.finished}
        stats = llm.stats()
        moments.append((time.perf_counter() - start, len(finished), tokens, _kv_bytes(stats)))
        on_step(len(finished), stats)
    after = llm.stats()
    for output in finished.values():
        output.raise_for_error()
    answers = [finished[request_id].outputs[0].token_ids for request_id in ids]
    asked = [query.answer_tokens for query in queries]
    assert [len(answer) for answer in answers] == asked, "an answer has another length than was asked for"
    assert tokens == sum(asked), "a step's output brought more than one token"
    return Run(
        seconds=moments[-1][0],
        answer_tokens=tokens,
        prompt_tokens=sum(len(query.token_ids) for query in queries),
        steps=after.num_steps - first_step,
        kv_bytes_peak=max(held for *_, held in moments),
        tally={name: value - before[name] for name, value in _tally(after).items()},
        digests=tuple(
            hashlib.sha256(str(list(answer)).encode()).hexdigest()[: 2 * _DIGEST_BYTES] for answer in answers
        ),
        trace=_trace(moments),
    )


def _params(answer_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)


def _warm_up(llm: LLM, query: Query) -> None:
    """Libraries set themselves up at the first pass."""
    llm.generate(list(query.token_ids), _params(2))


def _tally(stats: EngineStats) -> dict[str, float]:
    return asdict(stats.tally) if isinstance(stats, PaddedStats) else {}


def _kv_bytes(stats: EngineStats) -> int:
    return stats.kv_bytes_used + (stats.parked_bytes if isinstance(stats, PaddedStats) else 0)


def _trace(moments: Sequence[tuple[float, int, int, int]]) -> Trace:
    last = len(moments) - 1
    count = min(_TRACE_POINTS, len(moments))
    chosen = [moments[round(number * last / max(count - 1, 1))] for number in range(count)]
    seconds, completed, tokens, held = zip(*chosen, strict=True)
    return Trace(tuple(round(each, 3) for each in seconds), completed, tokens, held)
