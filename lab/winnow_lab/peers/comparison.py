"""One work, every configuration in turn: what is run, what it gave, and what of it a journal has."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from winnow.errors import ConfigError
from winnow_lab.peers.configurations import Load
from winnow_lab.peers.environment import CONVERT_SECONDS, Environment, PeerError, call
from winnow_lab.peers.peers import HERE, PEERS, Configuration, Peer
from winnow_lab.peers.protocol import Work
from winnow_lab.peers.runner import Outcome, parse_answers
from winnow_lab.peers.works import GivenWork
from winnow_lab.study import StudyOptions, flag
from winnow_lab.study.journal import CellJournal

UNFINISHED = 3  # the exit code while runs are missing


@dataclass(frozen=True)
class PeerOptions(StudyOptions):
    requests: int | None = flag(None, "in place of the work's own", least=1)
    peers: tuple[str, ...] = flag(tuple(PEERS), choices=PEERS)
    only: list[str] | None = flag(None, "rows whose 'PEER: CONFIGURATION' matches; may be repeated")
    rounds: int = flag(3, least=1)
    threads: int = flag(len(os.sched_getaffinity(0)), "of everyone", least=1)
    timeout: float = flag(900.0, "seconds of one run", least=0)
    folder: Path = flag(Path("runs/peers"), "environments, models")
    prepare: bool = flag(False, "install and convert, measure nothing")
    steps: int | None = flag(None, "stop after this number of runs; needs --journal", least=1)
    journal: Path | None = flag(None, "keep every run there, and run none that it has")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.journal is None:
            raise ConfigError("--steps needs --journal, or what was measured would be lost")

    def runs(self) -> Iterator[int]:
        """Return an entry for each run that this start may make."""
        return islice(count(), self.steps)


class Places:
    """Interpreters and converted models of peers, made in `folder` at the first use."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._pythons: dict[str, Path | PeerError] = {}
        self._models: dict[tuple[str, str], Path | PeerError] = {}

    def find(self, peer: Peer, weights: str) -> tuple[Path, Path]:
        """The interpreter for the peer's script, and the model in that format. What raises PeerError is tried once."""
        if peer.name not in self._pythons:
            self._pythons[peer.name] = _or_error(lambda: self._install(peer))
        python = _require(self._pythons[peer.name])
        key = peer.name, weights
        if key not in self._models:
            self._models[key] = _or_error(lambda: self._convert(peer, weights, python))
        return python, _require(self._models[key])

    def _install(self, peer: Peer) -> Path:
        if not peer.packages:
            return Path(sys.executable)
        environment = Environment(self._folder / "environments" / peer.name)
        environment.prepare(peer.requirements, peer.unwanted)
        return environment.python

    def _convert(self, peer: Peer, weights: str, python: Path) -> Path:
        if peer.convert is None:
            return self._model
        name = "-".join(word for word in (self._model.name, peer.name, weights) if word)
        converted = self._folder / "models" / name
        if not converted.is_dir():
            unfinished = converted.with_name(f"{name}.unfinished")
            command = peer.convert(self._model, unfinished, weights)
            if command is None:
                return self._model
            shutil.rmtree(unfinished, ignore_errors=True)
            tool, *words = command
            call([python.parent / tool, *words], f"{tool} for {peer.name}", CONVERT_SECONDS)
            unfinished.rename(converted)
        return converted


def _or_error(make: Callable[[], Path]) -> Path | PeerError:
    try:
        return make()
    except PeerError as error:
        return error


def _require(found: Path | PeerError) -> Path:
    if isinstance(found, PeerError):
        raise found
    return found


class Comparison:
    """A row for every configuration.

    Of a work whose contexts are judged before their questions, Winnow's alone. `journal` None: no run is kept; `steps`
    has an entry for each run that this start may make.
    """

    def __init__(
        self, given: GivenWork, options: PeerOptions, journal: Path | None, steps: Iterator[int]
    ) -> None:
        self._folder, self._timeout = options.folder.resolve(), options.timeout
        self.given = given
        self._threads = options.threads
        self._steps = steps
        self._places = Places(self._folder, given.model)
        identity = {} if journal is None else given.identity() | {"threads": options.threads}
        self._journal = CellJournal(journal, identity)
        float32_kvs = torch.backends.cpu.get_cpu_capability() != "AVX512"
        load = Load(
            len(given.prompts), given.longest, given.kv_seqs, float32_kvs, given.exam is not None, given.later
        )
        self.outcomes = [
            Outcome(PEERS[name], row)
            for name in options.peers
            if name == "winnow" or not given.later
            for row in PEERS[name].configurations(load)
            if _is_wanted(f"{name}: {row.name}", options.only)
        ]

    @property
    def missing(self) -> int:
        """Runs that another start has to make."""
        return sum(outcome.missing for outcome in self.outcomes)

    def prepare(self) -> bool:
        """Install every peer and convert its model. Returns whether all could be."""
        return all([self._prepare(outcome) for outcome in self.outcomes])

    def run_round(self, number: int) -> None:
        """Run every configuration once that has not failed, but for what the journal has."""
        for outcome in self.outcomes:
            if outcome.error is None:
                key = _key(outcome.peer, outcome.configuration, number)
                [found] = self._journal.rows.get(key, [None])
                if found is None and next(self._steps, None) is None:
                    outcome.missing += 1
                    continue
                if found is None and not self._prepare(outcome):
                    continue
                outcome.take(found or self._journal.add(key, self._run(outcome)))
                last = "" if outcome.error is None else outcome.error.splitlines()[-1]
                _say(f"round {number}, {_name(outcome)}: {last or f'{outcome.rates[-1]:.1f} tokens/s'}")

    def to_json(self) -> dict[str, Any]:
        given = self.given
        return {
            "work": given.name,
            "summary": given.summary,
            "workload": {
                "requests": len(given.prompts),
                "prompt_tokens": sum(map(len, given.prompts)),
                "longest": given.longest,
                "new_tokens": given.new_tokens,
                "contexts": given.contexts,
            },
            "kv_seqs": given.kv_seqs,
            "configurations": [outcome.to_json(given.exam) for outcome in self.outcomes],
        }

    def _prepare(self, outcome: Outcome) -> bool:
        """Return whether the row can be run; else its error is set."""
        try:
            self._places.find(outcome.peer, outcome.configuration.weights)
        except PeerError as unusable:
            outcome.error = str(unusable)
            _say(f"{_name(outcome)}: {outcome.error.splitlines()[-1]}")
        return outcome.error is None

    def _run(self, outcome: Outcome) -> dict[str, Any]:
        given, options = self.given, dict(outcome.configuration.options)
        new_tokens = options.pop("new_tokens", given.new_tokens)
        python, model = self._places.find(outcome.peer, outcome.configuration.weights)
        work = Work(
            str(model),
            given.prompts,
            new_tokens,
            self._threads,
            options,
            list(given.end_tokens),
            given.prefix_caching,
            given.sampling,
        )
        file, script = self._folder / "work.json", outcome.peer.script
        work.write(file)
        threads = {name: str(self._threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        try:
            command = [python, HERE / script, file]
            output = call(command, script, self._timeout, cwd=self._folder, variables=threads)
            return {"result": asdict(parse_answers(output, work)), "error": None}
        except PeerError as failed:
            return {"result": None, "error": str(failed)}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _key(peer: Peer, configuration: Configuration, number: int) -> str:
    """By what decides the result: a row that means something else now is measured again."""
    row = [peer.name, configuration.name, configuration.weights, configuration.options, number]
    return json.dumps(row, sort_keys=True)


def _name(outcome: Outcome) -> str:
    return f"{outcome.peer.name}, {outcome.configuration.name}"


def _is_wanted(row: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatchcase(row, pattern) for pattern in patterns)
