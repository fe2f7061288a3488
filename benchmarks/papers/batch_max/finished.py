"""Tasks whose accuracy is known, kept in a file, so that an interrupted experiment goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

from benchmarks.papers.batch_max.accuracy import Accuracy
from benchmarks.papers.batch_max.config import BatchMaxConfig
from benchmarks.papers.batch_max.methods import batch_max
from benchmarks.papers.batch_max.report import TaskResult, Trial
from winnow.errors import ConfigError
from winnow.fingerprint import Fingerprint, model_digest
from winnow.journal import create_journal, owner_differences, parse_object, whole_lines

_FORM, _VERSION = "winnow_bench_batch_max", 1
# What accuracy does not depend on.
_OTHER_SETTINGS = ("tasks", "repeats", "requests", "threads")


class FinishedTasks:
    """A journal (winnow.journal) with a line for each task.

    Raises:
        ConfigError: the file belongs to something else, or to an experiment with other settings.
    """

    def __init__(self, path: Path, config: BatchMaxConfig, model: Path, commit: str | None) -> None:
        self._path = path
        self.results: dict[str, TaskResult] = {}
        owner = _fingerprint(config, model, commit)
        if path.exists() and path.stat().st_size:
            self._read(owner)
        else:
            create_journal(path, _FORM, _VERSION, owner)

    def add(self, result: TaskResult) -> None:
        """Keep what one task came to."""
        self.results[result.name] = result
        with self._path.open("ab") as file:
            file.write(json.dumps(result.to_json()).encode() + b"\n")

    def _read(self, owner: Fingerprint) -> None:
        with self._path.open("rb") as file:
            told = owner_differences(file.readline(), _FORM, _VERSION, owner)
            if told is None:
                raise ConfigError(f"{self._path} is not a journal of this bench")
            if told.refused:
                raise ConfigError(f"{self._path} was begun with other settings: {'; '.join(told.refused)}")
            end = file.tell()
            for line in whole_lines(file):
                record = parse_object(line)
                if record is None:
                    break
                self.results[record["name"]] = _task(record)
                end += len(line)
        with self._path.open("r+b") as file:
            file.truncate(end)  # a torn line would swallow the next one


def _fingerprint(config: BatchMaxConfig, model: Path, commit: str | None) -> Fingerprint:
    settings = {name: value for name, value in vars(config).items() if name not in _OTHER_SETTINGS}
    return {"model": model_digest(model), "commit": commit, **settings}


def _task(record: dict[str, Any]) -> TaskResult:
    """The opposite of `TaskResult.to_json`."""
    asked = len(record["full"]["scores"])
    trials = tuple(
        Trial(
            trial["rule"],
            batch_max(trial["rule"], trial["max_kvs"]),
            trial["batch"],
            _accuracy(trial["accuracy"], asked),
            trial["held"],
        )
        for trial in record["trials"]
    )
    controls = {int(kvs): _accuracy(control, asked) for kvs, control in record["controls"].items()}
    return TaskResult(
        record["name"],
        record["metric"],
        record["longest_prompt"],
        _accuracy(record["full"], asked),
        trials,
        controls,
        record["bar"],
        record["seconds"],
    )


def _accuracy(record: dict[str, Any], asked: int) -> Accuracy:
    return Accuracy(tuple(record["scores"]), asked)
