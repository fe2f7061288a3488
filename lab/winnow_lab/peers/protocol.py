"""What the runner and a peer's script tell each other; imports nothing but the standard library.

The runner starts `python PEER.py WORK.json` in the peer's environment. The script answers the work and prints one line
of JSON, its last: seconds, the tokens of every answer, and the versions of what computed them.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

Tokens = list[list[int]]


@dataclass(frozen=True)
class Work:
    """The same for every peer, but for `model` and `options`."""

    model: str
    """Directory, converted for the peer if it needs that."""
    prompts: Tokens
    """Token ids."""
    new_tokens: int
    """Of every answer, greedy; at most, where tokens end it."""
    threads: int
    options: dict[str, Any]
    """What the configuration asks of this peer."""
    end_tokens: list[int] = field(default_factory=list)
    """Tokens that end an answer; none: the end of text does not end it either."""
    prefix_caching: bool = False
    """Whether KVs of equal beginnings are computed once."""
    sampling: list[dict[str, int]] = field(default_factory=list)
    """Of each prompt, for Winnow: `context_tokens`, `template_tail` and `answer_prefix` of its `SamplingParams`; empty:
    nothing is known of prompts."""

    @classmethod
    def read(cls, path: Path) -> "Work":
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def warm_up(self) -> "Work":
        """One tiny request."""
        return replace(self, prompts=[self.prompts[0][:8]], new_tokens=2, end_tokens=[], sampling=[])


@dataclass(frozen=True)
class Answers:
    """`seconds` cover all answers, but neither loading nor the warm-up; `tokens` are the new ones of each."""

    seconds: float
    cpu_seconds: float
    """User and system time within `seconds`, of all threads and processes of the peer."""
    tokens: Tokens
    versions: dict[str, str]
    """Of the packages that computed them."""


Answer = Callable[[Work], Tokens]


def serve(
    opened: Callable[[Work], AbstractContextManager[Answer]], packages: list[str], **versions: str
) -> None:
    """The main function of a peer's script: read the work, load the model, warm up, answer, print the one line."""
    work = Work.read(Path(sys.argv[1]))
    with opened(work) as answer:
        answer(work.warm_up())
        cpu, start = cpu_seconds(), time.perf_counter()
        tokens = answer(work)
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    emit(Answers(seconds, cpu, tokens, {package: version(package) for package in packages} | versions))


def emit(answers: Answers) -> None:
    """Print the one line; nothing may follow it."""
    print("\n" + json.dumps(asdict(answers)), flush=True)


def cpu_seconds() -> float:
    """User and system time of this process and of all that it started and that still run; of the latter on Linux."""
    ticks = sum(map(_ticks, _below(os.getpid()))) if Path("/proc/self/task").is_dir() else 0
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _below(process: int) -> Iterator[int]:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _below(child)


def _ticks(process: int) -> int:
    # The name of the program, which may hold anything, ends with the last bracket; fields 14 and 15 are the times.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
