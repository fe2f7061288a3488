"""A trace through one or several simulated engines, on a virtual clock."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from winnow.engine.requests.new_request import NewRequest
from winnow.errors import InvalidRequestError
from winnow.outputs import RequestOutput
from winnow.sampling import SamplingParams
from winnow_lab.bench.traces import TraceRequest
from winnow_lab.plan.deployment import Deployment
from winnow_lab.plan.fast_forward import FastForward
from winnow_lab.plan.simulated_engine import EngineSetup
from winnow_lab.plan.step_time import StepWork

_UNSHARED = 2**30
"""Token ids from here on stand for what a trace says nothing about: each prompt's own."""
_MOST_SAMPLES = 4096


# -- which engine gets a request ---------------------------------------------------------------------------------------


class Router(Protocol):
    def choose(self, request: TraceRequest, loads: "Sequence[Replica]") -> int:
        """The index of the engine that gets the request."""


@dataclass
class RoundRobin:
    _next: int = 0

    def choose(self, request: TraceRequest, loads: "Sequence[Replica]") -> int:
        chosen = self._next % len(loads)
        self._next += 1
        return chosen


class LeastLoaded:
    """Router to the engine with the fewest pending tokens; ties go to the first."""

    def choose(self, request: TraceRequest, loads: "Sequence[Replica]") -> int:
        return min(range(len(loads)), key=lambda index: loads[index].pending_tokens)


@dataclass
class PrefixAware:
    """Router to the engine that was sent the longest beginning of the prompt, unless it has `slack` times the least
    load and more.

    It goes by what it sent where, as a router that sees no caches must.
    """

    slack: float = 2.0
    _known: dict[int, set[int]] = field(default_factory=dict)

    def choose(self, request: TraceRequest, loads: "Sequence[Replica]") -> int:
        least = LeastLoaded().choose(request, loads)
        most = self.slack * loads[least].pending_tokens + request.prompt_tokens + request.output_tokens
        known = [self._known.get(index, set()) for index in range(len(loads))]
        matches = [sum(1 for _ in takewhile(own.__contains__, request.hash_ids)) for own in known]
        best = max(range(len(loads)), key=lambda index: (matches[index], -loads[index].pending_tokens))
        chosen = best if matches[best] and loads[best].pending_tokens <= most else least
        self._known.setdefault(chosen, set()).update(request.hash_ids)
        return chosen


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix": PrefixAware,
}


# -- a fleet -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """Outcome of one request; times in seconds of the virtual clock, None: it did not come to that."""

    request: TraceRequest
    replica: int
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    output_tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    tenant: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.request.arrival

    @property
    def latency(self) -> float | None:
        return None if self.finished is None else self.finished - self.request.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None: there is one alone."""
        if self.finished is None or self.first_token is None or self.output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Sample:
    time: float
    used_bytes: int
    host_bytes: int
    running: int
    waiting: int


@dataclass
class History:
    """Samples of an engine, evenly thinned out when they become many."""

    samples: list[Sample] = field(default_factory=list)
    _stride: int = 1
    _seen: int = 0

    def note(self, make: Callable[[], Sample]) -> None:
        self._seen += 1
        if self._seen % self._stride:
            return
        self.samples.append(make())
        if len(self.samples) >= _MOST_SAMPLES:
            del self.samples[1::2]
            self._stride *= 2


class Replica:
    def __init__(self, index: int, setup: EngineSetup, deployment: Deployment, *, leaps: bool = True) -> None:
        self.index = index
        self.simulated = setup.open(deployment)
        self.history = History()
        self.served: list[Served] = []
        self.pending_tokens = 0
        self.steps = 0
        self.kv_memory = setup.kv_memory
        self._prefix_caching = setup.prefix_caching
        self._fast_forward = FastForward(self.simulated, setup.prefix_caching) if leaps else None
        self._asked: dict[str, tuple[TraceRequest, str | None]] = {}

    def run(self, until: float) -> None:
        """Compute the steps that start before `until`."""
        engine, clock = self.simulated.engine, self.simulated.clock
        while engine.has_unfinished and clock.now < until:
            leapt = 0 if self._fast_forward is None else self._fast_forward.leap(until)
            self.steps += leapt
            if not leapt:
                outputs = engine.step()
                self.steps += 1
                for output in outputs:
                    self._finish(output)
            self.history.note(self._sample)
        if until < math.inf:
            clock.now = max(clock.now, until)

    def add(self, name: str, request: TraceRequest, tenant: str | None = None) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True, detokenize=False
        )
        token_ids = _prompt(request, int(name)) if self._prefix_caching else [0] * request.prompt_tokens
        try:
            self.simulated.engine.add(
                NewRequest(name, None, token_ids, params, tenant=tenant, final_only=True)
            )
        except InvalidRequestError as error:
            self.served.append(Served(request, self.index, tenant=tenant, error=str(error)))
            return
        self._asked[name] = request, tenant
        self.pending_tokens += request.prompt_tokens + request.output_tokens

    def _finish(self, output: RequestOutput) -> None:
        request, tenant = self._asked.pop(output.request_id)
        self.pending_tokens -= request.prompt_tokens + request.output_tokens
        metrics = output.metrics
        times = metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time
        counts = len(output.outputs[0].token_ids), metrics.num_preemptions, output.num_cached_tokens
        self.served.append(Served(request, self.index, *times, *counts, tenant, output.error))

    def _sample(self) -> Sample:
        simulated = self.simulated
        return Sample(
            simulated.clock.now,
            simulated.used_bytes,
            simulated.scheduler.ledger.host.used_bytes * simulated.rows,
            len(simulated.scheduler.running),
            len(simulated.scheduler.waiting),
        )


@dataclass(frozen=True)
class Simulation:
    """Outcome of `simulate`.

    Attributes:
        served: all requests, by arrival.
        histories: samples over time, by replica.
        work: of all replicas together.
        kv_bytes: `kv_memory` of each replica; `kv_bytes_peak` the most that one used, `host_bytes_peak` on the host.
    """

    served: tuple[Served, ...]
    histories: tuple[tuple[Sample, ...], ...]
    work: StepWork
    steps: int
    rounds: int
    preemptions: dict[str, int]
    kv_bytes: int
    kv_bytes_peak: int
    host_bytes_peak: int
    cached_tokens: int

    @property
    def seconds(self) -> float:
        return max((each.finished for each in self.served if each.finished is not None), default=0.0)


def simulate(
    deployment: Deployment,
    setup: EngineSetup,
    trace: Sequence[TraceRequest],
    replicas: int = 1,
    router: Router | None = None,
    *,
    tenants: Sequence[str | None] = (None,),
    leaps: bool = True,
) -> Simulation:
    """Serve a trace with `replicas` engines.

    Args:
        tenants: on whose account requests run, in turn.
        leaps: pass over steps that change lengths alone; the outcome is the same without.
    """
    router = router or RoundRobin()
    fleet = [Replica(index, setup, deployment, leaps=leaps) for index in range(replicas)]
    for number, request in enumerate(trace):
        for replica in fleet:
            replica.run(request.arrival)
        fleet[router.choose(request, fleet)].add(str(number), request, tenants[number % len(tenants)])
    for replica in fleet:
        replica.run(math.inf)
    return _collect(fleet)


def _collect(fleet: Sequence[Replica]) -> Simulation:
    engines = [replica.simulated for replica in fleet]
    schedulers = [engine.scheduler for engine in engines]
    swapped = sum(scheduler.memory.swap.total["num_swaps"] for scheduler in schedulers)
    work = StepWork()
    for engine in engines:
        work = work.plus(engine.executor.total)
    served = sorted((each for r in fleet for each in r.served), key=lambda each: each.request.arrival)
    return Simulation(
        served=tuple(served),
        histories=tuple(tuple(replica.history.samples) for replica in fleet),
        work=work,
        steps=sum(replica.steps for replica in fleet),
        rounds=sum(scheduler.rounds.total.rounds for scheduler in schedulers),
        preemptions={
            "swap": swapped,
            "recompute": sum(scheduler.running.num_preemptions for scheduler in schedulers) - swapped,
        },
        kv_bytes=fleet[0].kv_memory,
        kv_bytes_peak=max(engine.peak_bytes for engine in engines),
        host_bytes_peak=max(each.scheduler.ledger.host.peak_bytes * each.rows for each in engines),
        cached_tokens=sum(scheduler.ledger.prefixes.num_hit_tokens for scheduler in schedulers),
    )


def _prompt(request: TraceRequest, number: int) -> list[int]:
    """Token ids that begin as those of requests with the same hash ids do."""
    token_ids: list[int] = []
    for hash_id in request.hash_ids:
        token_ids += [hash_id % _UNSHARED] * request.block_tokens
    token_ids += [_UNSHARED + number % _UNSHARED] * (request.prompt_tokens - len(token_ids))
    return token_ids[: request.prompt_tokens]
