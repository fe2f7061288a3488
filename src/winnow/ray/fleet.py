"""Workers on the machines of a Ray cluster, and a file that is run over them."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from winnow.batch.driver import MAX_EARLY
from winnow.batch.reader import RawLine, Shard
from winnow.batch.stream import OrderedWriter
from winnow.batch.tally import Tally
from winnow.config import EngineConfig
from winnow.errors import UsageError
from winnow.models.load.hub import locate_model
from winnow.outputs import EngineStats
from winnow.ray.worker import LineWorker

MAX_LOSSES = 10
"""Number of times that a worker, as a process or with its machine, is replaced by another."""
_WAIT_SECONDS = 0.05
LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
)
"""Errors of calls whose worker is gone."""


@dataclass(frozen=True)
class Placement:
    """Number of workers, and what each takes of a machine.

    Attributes:
        threads: cores of each; its engine computes on as many threads.
        gpus: cards of each.
        memory: bytes of each, of weights and KVs; None: the cluster is not asked for any.
    """

    workers: int
    threads: int
    gpus: int
    memory: int | None

    @classmethod
    def of(cls, options: Mapping[str, Any], workers: int | None) -> "Placement":
        """Return a worker for each card of the cluster, or for each machine where models run on CPUs.

        Args:
            workers: how many to start in place of that.

        Raises:
            UsageError: no machine has room for one.
        """
        config = EngineConfig.from_options(dict(options))
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cores = [int(machine.get("CPU", 0)) for machine in machines]
        gpus = sum(int(machine.get("GPU", 0)) for machine in machines) if _wants_gpu(config) else 0
        if gpus:
            return cls(workers or gpus, 1, 1, None)
        hosts = [number for number in cores if number]
        threads = config.model.threads or min(hosts, default=0)
        fits = sum(number // threads for number in hosts) if threads else 0
        if not fits:
            raise UsageError(
                f"no machine of the Ray cluster has {threads or 'any'} cores for a worker: {max(cores, default=0)} "
                "is the most"
            )
        return cls(workers or fits, threads, 0, _footprint(config))

    def describe(self) -> str:
        """Return the number of workers and what each takes, in words."""
        each = f"{self.gpus} GPU" if self.gpus else f"{self.threads} threads"
        return f"{self.workers} workers of {each}"

    def actor_options(self) -> dict[str, Any]:
        """Return the resources in the words of `ray.remote` and `Dataset.map_batches`."""
        found: dict[str, Any] = {"num_cpus": self.threads, "num_gpus": self.gpus}
        return found if self.memory is None else {**found, "memory": self.memory}


@dataclass(eq=False)
class _Worker:
    """A worker, and the lines that it computes by the calls that asked for them."""

    actor: Any
    started: "ray.ObjectRef[None] | None"
    """Call that returns once its model is loaded; None: it has."""
    asked: dict["ray.ObjectRef[bytes]", RawLine] = field(default_factory=dict)


class Fleet:
    """Workers that answer the lines of one file, until `close`.

    One that is lost is replaced, where the cluster has room for another, and its lines go to the others.
    """

    def __init__(self, options: Mapping[str, Any], defaults: Mapping[str, Any], placement: Placement) -> None:
        config = EngineConfig.from_options(dict(options))
        self._answered = Tally()
        # What one engine can compute, and as much again that waits: whatever ends is replaced at once.
        self._per_worker = 2 * config.scheduler.max_num_seqs
        if not placement.gpus:
            options = {**options, "threads": placement.threads}
        actor = ray.remote(LineWorker).options(
            **placement.actor_options(), max_concurrency=2 * self._per_worker
        )
        self._start = lambda: actor.remote(dict(options), dict(defaults))
        self._losses_left = MAX_LOSSES * placement.workers
        self._workers: list[_Worker] = []
        for _ in range(placement.workers):
            self._add_worker()

    def run(
        self,
        lines: Iterator[RawLine],
        writer: OrderedWriter,
        tally: Tally,
        shard: Shard,
        on_answer: Callable[[], None],
    ) -> None:
        """Answer every line of `shard` that `writer` does not hold.

        Raises:
            UsageError: workers were lost too often, or cannot start, or an engine failed.
        """
        left = (raw for raw in lines if shard.holds(raw.index) and not writer.holds(shard.place(raw.index)))
        again: list[RawLine] = []
        """Lines of workers that were lost."""
        while True:
            while (worker := self._idlest()) is not None and (again or writer.num_early < MAX_EARLY):
                raw = again.pop() if again else next(left, None)
                if raw is None:
                    break
                worker.asked[worker.actor.answer.remote(raw)] = raw
            callers = {call: each for each in self._workers for call in each.asked}
            starting = {each.started: each for each in self._workers if each.started is not None}
            if not callers and not again and self._idlest() is not None:
                return
            waited = [*callers, *starting]
            # All that end in a while at once: each call looks at every reference.
            done, _ = ray.wait(waited, num_returns=len(waited), timeout=_WAIT_SECONDS)
            for call in done:
                worker = callers.get(call) or starting[call]
                try:
                    line = ray.get(call)
                except LOST as error:
                    if worker in self._workers:
                        again += self._replace(worker, error)
                    continue
                except ray.exceptions.RayTaskError as error:
                    raise UsageError(f"a worker failed: {error.cause}") from error
                if worker.started is not None:
                    worker.started = None
                    continue
                writer.put(shard.place(worker.asked.pop(call).index), line)
                record = json.loads(line)
                tally.add(record)
                self._answered.add(record)
            on_answer()

    def stats(self) -> EngineStats:
        """Return tokens that the workers computed for this file; what they say of their memory stays with them."""
        return EngineStats(
            prompt_tokens=self._answered.prompt_tokens, generated_tokens=self._answered.generated_tokens
        )

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            ray.kill(worker.actor)

    def _idlest(self) -> _Worker | None:
        """Return the worker with the fewest lines; None: all have enough, or none has started."""
        ready = [each for each in self._workers if each.started is None]
        worker = min(ready, key=lambda each: len(each.asked), default=None)
        return worker if worker is not None and len(worker.asked) < self._per_worker else None

    def _add_worker(self) -> None:
        actor = self._start()
        self._workers.append(_Worker(actor, actor.wait_started.remote()))

    def _replace(self, worker: _Worker, error: Exception) -> list[RawLine]:
        """Start another worker in place of one that was lost; return its lines."""
        if worker.started is not None and "creation task" in str(error):
            raise UsageError(f"a worker cannot start: {error}") from error
        if self._losses_left == 0:
            raise UsageError(f"workers were lost too often: {error}") from error
        self._losses_left -= 1
        self._workers.remove(worker)
        self._add_worker()
        return list(worker.asked.values())


def connect(address: str | None) -> None:
    """Open a connection to the cluster at `address`; None: the one of this machine, which is started where none is.

    Raises:
        UsageError: there is no such cluster.
    """
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"--ray {address or ''}: {error}") from error


def _wants_gpu(config: EngineConfig) -> bool:
    return str(config.model.device).startswith(("auto", "cuda", "None"))


def _footprint(config: EngineConfig) -> int:
    """Return bytes of a model's files and of its KVs."""
    path = locate_model(config.model)
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return config.cache.kv_memory + sum(file.stat().st_size for file in files)
