"""What the runner and a peer's script tell each other; imports nothing but the standard library.

The runner starts `python PEER.py WORK.json` in the peer's environment. The script answers the work and prints one line
of JSON, its last: seconds, the tokens of every answer, and the versions of what computed them.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Work:
    """The same for every peer, but for `model` and `options`."""

    model: str
    """Directory, converted for the peer if it needs that."""
    prompts: list[list[int]]
    """Token ids."""
    new_tokens: int
    """Of every answer, greedy; the end of text does not end it."""
    threads: int
    options: dict[str, Any]
    """What the configuration asks of this peer."""

    @classmethod
    def read(cls, path: Path) -> "Work":
        """From a file that `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class Answers:
    """`seconds` cover all answers, but neither loading nor the warm-up; `tokens` are the new ones of each."""

    seconds: float
    tokens: list[list[int]]
    versions: dict[str, str]
    """Of the packages that computed them."""


def serve(run: Callable[[Work], tuple[float, list[list[int]]]], packages: list[str]) -> None:
    """The main function of a peer's script: read the work, let `run` do it, print the one line.

    `run` returns the seconds of all answers, loading and warm-up excluded, and the new tokens of each.
    """
    seconds, tokens = run(Work.read(Path(sys.argv[1])))
    emit(Answers(seconds, tokens, {package: version(package) for package in packages}))


def emit(answers: Answers) -> None:
    """Print the one line; nothing may follow it."""
    print("\n" + json.dumps(asdict(answers)), flush=True)
