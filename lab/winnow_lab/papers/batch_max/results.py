"""What came of it, and what follows: gains over decoding-only eviction at its fastest, as tables too."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow_lab.papers.batch_max.measure import Accuracy, Run
from winnow_lab.papers.batch_max.methods import EXTREME_DECODES, FULL_CACHE, Method, Options, batch_max
from winnow_lab.papers.harness import median_and_range
from winnow_lab.report.tables import TextTable


@dataclass(frozen=True)
class PaperRow:
    """ED at its largest batch, and Batch-Max beside it, on one task."""

    model: str
    task: str
    ed_batch: int
    ed_rate: float
    batch: int
    max_kvs: int
    rate: float
    accuracy_share: float
    """Batch-Max's accuracy beside the full cache's."""
    setting: str

    @property
    def gain(self) -> float:
        """How much faster than ED: 0.4 is 40 %."""
        return self.rate / self.ed_rate - 1


_LLAMA, _PHI = "Llama-2-13b-chat, 2-4 V100", "Phi-3.5-mini, 4 TITAN V"
PAPER_SETTING = (
    "The paper: prompts with worked examples, of up to 3,584 tokens, padded to the batch's longest; 960 samples; "
    "GPUs. Winnow: no padding; ED at the faster of |kv| = 2 and "
    "65, where the paper has 2, the faster one there."
)
PAPER_ROWS = (
    PaperRow(_LLAMA, "CNN/DM", 4, 42.0, 40, 896, 80.3, 0.142 / 0.145, "1-shot summaries, ROUGE-2"),
    PaperRow(_LLAMA, "NarrativeQA", 4, 40.0, 16, 1728, 46.2, 0.310 / 0.312, "2-shot answers, ROUGE-2"),
    PaperRow(_LLAMA, "GSM8K", 3, 30.3, 10, 1408, 43.7, 0.327 / 0.340, "16-shot sums, exact"),
    PaperRow(_PHI, "CNN/DM", 2, 29.0, 5, 2176, 36.3, 0.148 / 0.153, "1-shot summaries, ROUGE-2"),
    PaperRow(_PHI, "NarrativeQA", 2, 28.0, 6, 1984, 37.4, 0.351 / 0.360, "2-shot answers, ROUGE-2"),
    PaperRow(_PHI, "GSM8K", 2, 28.4, 8, 1664, 43.8, 0.774 / 0.783, "16-shot sums, exact"),
)
"""The rows whose accuracy is near the full cache's: those behind the paper's 44.0 %."""


AT_LEAST_ROWS = (
    PaperRow(_LLAMA, "CNN/DM", 4, 42.0, 32, 1024, 73.8, 0.146 / 0.145, "accuracy at least the full cache's"),
    PaperRow(
        _LLAMA, "NarrativeQA", 4, 40.0, 15, 1792, 43.3, 0.314 / 0.312, "accuracy at least the full cache's"
    ),
    PaperRow(_LLAMA, "GSM8K", 3, 30.3, 8, 1536, 39.3, 0.341 / 0.340, "accuracy at least the full cache's"),
)
"""The rows behind its 38.0 %."""


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
    extreme: tuple[Accuracy, ...] = ()
    """Of ED, by `EXTREME_DECODES`."""

    def best(self, rule: str, least: float | None = None) -> Trial | None:
        """Return the largest batch that held, or whose accuracy is `least` and more."""
        bar = self.bar if least is None else least
        held = [
            trial for trial in self.trials if trial.rule == rule and trial.held and trial.accuracy.mean >= bar
        ]
        return max(held, key=lambda trial: trial.batch, default=None)

    def nearest(self, rule: str) -> Trial | None:
        """The smallest batch that was tried, where none held."""
        tried = [trial for trial in self.trials if trial.rule == rule]
        return min(tried, key=lambda trial: trial.batch, default=None)

    def is_informative(self, trial: Trial) -> bool:
        """Whether the latest KVs alone, as many, do not answer as well."""
        assert trial.method.max_kvs is not None, "Batch-Max has a |kv|"
        control = self.controls[trial.method.max_kvs]
        return not (control.complete and control.mean >= self.bar)

    def to_json(self) -> dict[str, Any]:
        """All fields by name, for `from_json`."""
        return vars(self) | {
            "full": self.full.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
            "controls": {str(kvs): accuracy.to_json() for kvs, accuracy in self.controls.items()},
            "extreme": [accuracy.to_json() for accuracy in self.extreme],
        }

    @classmethod
    def from_json(cls, reported: dict[str, Any]) -> "TaskResult":
        """The result that `to_json` gave."""
        reported = {name: value for name, value in reported.items() if name not in ("commit", "date")}
        asked = len(reported["full"]["scores"])

        def accuracy(each: dict[str, Any]) -> Accuracy:
            return Accuracy(tuple(each["scores"]), asked)

        def trial(each: dict[str, Any]) -> Trial:
            method = batch_max(each["rule"], each["max_kvs"])
            return Trial(each["rule"], method, each["batch"], accuracy(each["accuracy"]), each["held"])

        return cls(
            **reported
            | {
                "full": accuracy(reported["full"]),
                "trials": tuple(map(trial, reported["trials"])),
                "controls": {int(kvs): accuracy(each) for kvs, each in reported["controls"].items()},
                "extreme": tuple(map(accuracy, reported["extreme"])),
            }
        )


@dataclass(frozen=True)
class BatchMaxReport:
    """The whole experiment."""

    config: Options
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

    def held(self, rule: str, *, at_least: bool = False) -> list[tuple[TaskResult, Trial]]:
        """Return the tasks on which the rule holds accuracy, or reaches the full cache's, with its largest batch."""
        found = [(task, task.best(rule, task.full.mean if at_least else None)) for task in self.tasks]
        return [(task, trial) for task, trial in found if trial is not None]

    def mean_gain(self, rule: str, *, at_least: bool = False) -> float | None:
        """Return the mean over tasks on which the latest KVs alone would not do; None: there are none."""
        held = self.held(rule, at_least=at_least)
        gains = [self.gain(trial) for task, trial in held if task.is_informative(trial)]
        return statistics.fmean(gains) if gains else None

    def to_json(self) -> dict[str, Any]:
        """All fields by name, and what follows from them."""
        return vars(self) | {
            "config": self.config.identity,
            "mean_gain": {rule: self.mean_gain(rule) for rule in self.config.rules},
            "mean_gain_at_least": {rule: self.mean_gain(rule, at_least=True) for rule in self.config.rules},
            "gains": {
                rule: {task.name: self.gain(trial) for task, trial in self.held(rule)}
                for rule in self.config.rules
            },
            "tasks": [task.to_json() for task in self.tasks],
            "speeds": [speed.to_json() for speed in self.speeds],
            "continuous": [speed.to_json() for speed in self.continuous],
        }


def distinct(trials: Sequence[Trial]) -> list[Trial]:
    """One of each method and batch size, in their order."""
    return list({(trial.method, trial.batch): trial for trial in trials}.values())


PARTS = ("prefill", "decode", "evict", "host")


def all_tables(report: BatchMaxReport) -> tuple[TextTable, ...]:
    """Every table, in reading order."""
    return (
        speed_table(report, report.speeds, "Batches of fixed size, as in the paper"),
        task_table(report),
        parts_table(report.speeds, "Seconds per prompt with its answer, by part (medians)"),
        speed_table(report, report.continuous, f"Winnow's own scheduler, {report.config.requests} requests"),
        parts_table(
            report.continuous, "Seconds per prompt with its answer, by part, in Winnow's own scheduler"
        ),
        paper_table(report),
    )


def speed_table(report: BatchMaxReport, speeds: Sequence[Speed], title: str) -> TextTable:
    """Methods, batch sizes and rates, beside the fastest ED of the same table."""
    fastest = max((speed.rate for speed in speeds if speed.method.name == "ED"), default=0.0)
    rows = []
    if speeds is report.speeds:
        rows.append(("ED", (str(report.out_of_memory), "2", "", "out of memory", "", "")))
    for speed in speeds:
        rate, least, most = median_and_range(run.rate for run in speed.runs)
        kvs = "all" if speed.method.max_kvs is None else str(speed.method.max_kvs)
        batch = str(speed.batch if speeds is report.speeds else max(run.most_running for run in speed.runs))
        memory = f"{max(run.kv_bytes for run in speed.runs) / 2**20:.1f}"
        rates = (f"{rate:,.0f}", f"{least:,.0f}-{most:,.0f}", _percent(rate / fastest - 1))
        if speeds is report.speeds and not speed.together:
            rates = (f"{rates[0]} (not all at once)", *rates[1:])
        rows.append((speed.method.name, (batch, kvs, memory, *rates)))
    batch_column = "b" if speeds is report.speeds else "at once, most"
    columns = (batch_column, "|kv|", "MiB used", "tokens/s", "least-most", "beside ED")
    return TextTable(title, "method", columns, tuple(rows))


def task_table(report: BatchMaxReport) -> TextTable:
    """For each task and rule: the largest batch that holds accuracy."""
    rows: list[tuple[str, tuple[str, ...]]] = []
    for task in report.tasks:
        full = task.full
        rows.append((task.name, (FULL_CACHE.name, "", "all", f"{full.mean:.3f}", "", "", "", "")))
        for method, found in zip(EXTREME_DECODES, task.extreme, strict=False):
            rows.append(("", (method.name, "", str(method.max_kvs), f"{found.mean:.3f}", "", "", "", "")))
        for rule in report.config.rules:
            near, at_least = task.best(rule), task.best(rule, full.mean)
            rows.append(("", _rule_entries(report, task, rule, near)))
            if at_least is not None and at_least != near:
                rows.append(("", _rule_entries(report, task, rule, at_least)))
    for rule in report.config.rules:
        for name, strict in (("mean", False), ("mean, at least FKV", True)):
            gain = report.mean_gain(rule, at_least=strict)
            rows.append((name, (f"BM {rule}", *[""] * 5, "" if gain is None else _percent(gain), "")))
    columns = ("method", "b", "|kv|", "accuracy", "of FKV", "tokens/s", "beside ED", "latest KVs")
    title = f"Accuracy within {report.config.within:g} % of the full cache, and at least as high: the largest batches"
    return TextTable(title, "task", columns, tuple(rows), words=(0,))


def _rule_entries(
    report: BatchMaxReport, task: TaskResult, rule: str, trial: Trial | None
) -> tuple[str, ...]:
    if trial is None:
        near = task.nearest(rule)
        if near is None:
            return (f"BM {rule}", "", "", "no batch fits", "", "", "", "")
        cells = (str(near.batch), str(near.method.max_kvs), _accuracy(near.accuracy))
        return (near.method.name, *cells, "too low", "", "none", "")
    speed = report.speed(trial.method, trial.batch)
    accuracy = trial.accuracy
    share = f"{accuracy.mean / task.full.mean:.1%} ± {accuracy.error_beside(task.full) / task.full.mean:.1%}"
    control = task.controls[trial.method.max_kvs or 0]
    latest = "too low" if task.is_informative(trial) else f"{control.mean:.3f}: as good"
    return (
        trial.method.name,
        str(trial.batch),
        str(trial.method.max_kvs),
        _accuracy(accuracy),
        share,
        f"{speed.rate:,.0f}",
        _percent(report.gain(trial)),
        latest,
    )


def parts_table(speeds: Iterable[Speed], title: str) -> TextTable:
    """Where the time goes."""
    rows = []
    for speed in speeds:
        parts = [speed.part(name) / speed.batch for name in PARTS]
        kvs = "all" if speed.method.max_kvs is None else str(speed.method.max_kvs)
        cells = (f"{each:.3f}" for each in (*parts, sum(parts)))
        rows.append((speed.method.name, (str(speed.batch), kvs, *cells)))
    return TextTable(title, "method", ("b", "|kv|", *PARTS, "sum"), tuple(rows))


def paper_table(report: BatchMaxReport) -> TextTable:
    """The paper's rows, and what held here below them."""
    model = report.config.model or "demo model"
    rows: list[tuple[str, tuple[str, ...]]] = [
        (
            row.model,
            (
                row.task,
                row.setting,
                str(row.ed_batch),
                str(row.batch),
                str(row.max_kvs),
                f"{row.accuracy_share:.1%}",
                _percent(row.gain),
            ),
        )
        for row in (*PAPER_ROWS, *AT_LEAST_ROWS)
    ]
    mean = sum(row.gain for row in PAPER_ROWS) / len(PAPER_ROWS)
    rows.append(("paper, mean of those near FKV", (*[""] * 6, _percent(mean))))
    for rule in report.config.rules:
        for task, trial in report.held(rule):
            cells = (str(report.extreme_decode.batch), str(trial.batch), str(trial.method.max_kvs))
            share = f"{trial.accuracy.mean / task.full.mean:.1%}"
            setting = f"{task.metric}, {trial.method.name}"
            rows.append((model, (task.name, setting, *cells, share, _percent(report.gain(trial)))))
    columns = ("task", "setting", "b of ED", "b of BM", "|kv|", "of FKV", "beside ED")
    return TextTable("Beside the paper", "model", columns, tuple(rows), notes=(PAPER_SETTING,), words=(0, 1))


def _accuracy(accuracy: Accuracy) -> str:
    reported = f"{accuracy.mean:.3f}"
    return reported if accuracy.complete else f"{reported} of the first {len(accuracy.scores)}"


def _percent(share: float) -> str:
    return f"{share:+.0%}"
