"""One work, every configuration in turn: what is run, what it gave, and what of it a journal has."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from winnow_lab.peers.configurations import Load
from winnow_lab.peers.environment import PeerError
from winnow_lab.peers.journal import Entry, Journal
from winnow_lab.peers.peers import Peer
from winnow_lab.peers.preparing import Places
from winnow_lab.peers.protocol import Work
from winnow_lab.peers.runner import Outcome, Runner
from winnow_lab.peers.works import GivenWork


class Steps:
    """How many more runs this start may make; None: all."""

    def __init__(self, most: int | None) -> None:
        self._left = most

    def take(self) -> bool:
        """Count one, if there is one left."""
        if self._left is None:
            return True
        self._left -= 1
        return self._left >= 0


class Comparison:
    """A row for every configuration.

    Args:
        given: the work.
        peers: by name, those that take part; of a work whose contexts are judged before their questions, Winnow alone.
        arguments: of the command line.
        journal: a file that keeps every run; None: nothing is kept.

    Raises:
        PeerError: the journal is another work's.
    """

    def __init__(
        self,
        given: GivenWork,
        peers: Mapping[str, Peer],
        arguments: argparse.Namespace,
        journal: Path | None,
        console: Console,
        steps: Steps,
    ) -> None:
        folder = arguments.folder.resolve()
        self.given = given
        self._threads = arguments.threads
        self._console = console
        self._steps = steps
        self._places = Places(folder, given.model, arguments.lock)
        self._runner = Runner(folder, arguments.timeout, arguments.lock)
        identity = {} if journal is None else given.identity() | {"threads": arguments.threads}
        self._journal = Journal(journal, identity)
        float32_kvs = torch.backends.cpu.get_cpu_capability() != "AVX512"
        load = Load(
            len(given.prompts), given.longest, given.kv_seqs, float32_kvs, given.exam is not None, given.later
        )
        self.outcomes = [
            Outcome(peers[name], row)
            for name in arguments.peers
            if name == "winnow" or not given.later
            for row in peers[name].configurations(load)
            if _is_wanted(f"{name}: {row.name}", arguments.only)
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
                entry = self._journal.find(outcome.peer, outcome.configuration, number)
                if entry is None and not self._steps.take():
                    outcome.missing += 1
                    continue
                if entry is None and not self._prepare(outcome):
                    continue
                outcome.take(entry or self._run(outcome, number))
                self._say(outcome, number)

    def to_json(self) -> dict[str, Any]:
        """The work and its rows, for a report."""
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
            self._print(f"{_name(outcome)}: {outcome.error.splitlines()[-1]}")
        return outcome.error is None

    def _run(self, outcome: Outcome, number: int) -> Entry:
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
        try:
            result, error = asdict(self._runner.run(python, outcome, work)), None
        except PeerError as failed:
            result, error = None, str(failed)
        return self._journal.add(outcome.peer, outcome.configuration, number, result, error)

    def _say(self, outcome: Outcome, number: int) -> None:
        result = (
            f"{outcome.rates[-1]:.1f} tokens/s" if outcome.error is None else outcome.error.splitlines()[-1]
        )
        self._print(f"round {number}, {_name(outcome)}: {result}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def _name(outcome: Outcome) -> str:
    return f"{outcome.peer.name}, {outcome.configuration.name}"


def _is_wanted(row: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatchcase(row, pattern) for pattern in patterns)
