"""What came of it, and what follows: gains over decoding-only eviction at its fastest."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.papers.batch_max.accuracy import Accuracy
from benchmarks.papers.batch_max.config import BatchMaxConfig
from benchmarks.papers.batch_max.methods import Method
from benchmarks.papers.batch_max.run import Run


@dataclass(frozen=True)
class Speed:
    """One method at one batch size, timed several times."""

    method: Method
    batch: int
    runs: tuple[Run, ...]

    @property
    def together(self) -> bool:
        """Whether memory sufficed every time."""
        return all(run.together for run in self.runs)

    @property
    def rate(self) -> float:
        """New tokens per second, the median."""
        return statistics.median(run.rate for run in self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        """Least and most."""
        rates = [run.rate for run in self.runs]
        return min(rates), max(rates)

    def part(self, name: str) -> float:
        """Seconds of "prefill", "decode", "evict" or "host", the median."""
        return statistics.median(getattr(run, name) for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """Names, medians and all runs."""
        return {
            "method": self.method.name,
            "max_kvs": self.method.max_kvs,
            "batch": self.batch,
            "rate": self.rate,
            "together": self.together,
            "runs": [run.to_json() for run in self.runs],
        }


@dataclass(frozen=True)
class Trial:
    """Batch-Max by one rule on one task, with the most KVs that the batch leaves room for."""

    rule: str
    method: Method
    batch: int
    accuracy: Accuracy
    held: bool
    """Whether accuracy stayed near enough to the full cache's."""

    def to_json(self) -> dict[str, Any]:
        """The fields by name, the method as its |kv|."""
        return {
            "rule": self.rule,
            "max_kvs": self.method.max_kvs,
            "batch": self.batch,
            "held": self.held,
            "accuracy": self.accuracy.to_json(),
        }


@dataclass(frozen=True)
class TaskResult:
    """One task: the full cache, and what was tried within the memory."""

    name: str
    metric: str
    longest_prompt: int
    full: Accuracy
    trials: tuple[Trial, ...]
    controls: Mapping[int, Accuracy]
    """By |kv|: the same loop, keeping the latest KVs."""
    bar: float
    """The accuracy that counts as holding."""
    seconds: float
    """What finding this out took."""

    def best(self, rule: str) -> Trial | None:
        """The largest batch that held."""
        held = [trial for trial in self.trials if trial.rule == rule and trial.held]
        return max(held, key=lambda trial: trial.batch, default=None)

    def nearest(self, rule: str) -> Trial | None:
        """The smallest batch that was tried, where none held."""
        tried = [trial for trial in self.trials if trial.rule == rule]
        return min(tried, key=lambda trial: trial.batch, default=None)

    def discriminates(self, trial: Trial) -> bool:
        """Whether the latest KVs alone, as many, do not answer as well."""
        assert trial.method.max_kvs is not None, "Batch-Max has a |kv|"
        control = self.controls[trial.method.max_kvs]
        return not (control.complete and control.mean >= self.bar)

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {
            "name": self.name,
            "metric": self.metric,
            "longest_prompt": self.longest_prompt,
            "bar": self.bar,
            "seconds": self.seconds,
            "full": self.full.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
            "controls": {str(kvs): accuracy.to_json() for kvs, accuracy in self.controls.items()},
        }


@dataclass(frozen=True)
class BatchMaxReport:
    """The whole experiment."""

    config: BatchMaxConfig
    out_of_memory: int
    """The smallest batch that ED could not hold (b0)."""
    tasks: tuple[TaskResult, ...]
    speeds: tuple[Speed, ...]
    continuous: tuple[Speed, ...]
    """In Winnow's own scheduler: prompts one after the other, each answer beside the next prompt. `batch` is the number
    of requests."""
    kv_bytes_budget: int
    seconds: Mapping[str, float]
    """What the experiment itself took, by stage; accuracy that was known from an earlier start included."""

    @property
    def extreme_decode(self) -> Speed:
        """ED at its fastest."""
        return max(
            (speed for speed in self.speeds if speed.method.name == "ED"), key=lambda speed: speed.rate
        )

    def speed(self, method: Method, batch: int) -> Speed:
        """The row of a method at a batch size."""
        return next(speed for speed in self.speeds if (speed.method, speed.batch) == (method, batch))

    def gain(self, trial: Trial) -> float:
        """How much faster than ED: 0.4 is 40 %."""
        return self.speed(trial.method, trial.batch).rate / self.extreme_decode.rate - 1

    def held(self, rule: str) -> list[tuple[TaskResult, Trial]]:
        """The tasks on which the rule holds accuracy, with its largest batch."""
        found = [(task, task.best(rule)) for task in self.tasks]
        return [(task, trial) for task, trial in found if trial is not None]

    def mean_gain(self, rule: str) -> float | None:
        """Over tasks on which the rule holds accuracy and the latest KVs alone would not; None: there are none."""
        gains = [self.gain(trial) for task, trial in self.held(rule) if task.discriminates(trial)]
        return statistics.fmean(gains) if gains else None

    def to_json(self) -> dict[str, Any]:
        """All fields by name, and what follows from them."""
        return {
            "config": asdict(self.config),
            "out_of_memory": self.out_of_memory,
            "kv_bytes_budget": self.kv_bytes_budget,
            "mean_gain": {rule: self.mean_gain(rule) for rule in self.config.rule_names},
            "gains": {rule: _gains(self, rule) for rule in self.config.rule_names},
            "tasks": [task.to_json() for task in self.tasks],
            "speeds": [speed.to_json() for speed in self.speeds],
            "continuous": [speed.to_json() for speed in self.continuous],
            "seconds": dict(self.seconds),
        }


def _gains(report: BatchMaxReport, rule: str) -> dict[str, float]:
    return {task.name: report.gain(trial) for task, trial in report.held(rule)}


def distinct(trials: Sequence[Trial]) -> list[Trial]:
    """One of each method and batch size, in their order."""
    return list({(trial.method, trial.batch): trial for trial in trials}.values())
