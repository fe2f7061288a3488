"""Outcome of one configuration of one peer, each round of which is a process of its own."""

import hashlib
import json
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from winnow_lab.peers.environment import PeerError
from winnow_lab.peers.peers import Configuration, Peer
from winnow_lab.peers.protocol import Answers, Work
from winnow_lab.peers.works import Exam


@dataclass
class Outcome:
    """What became of a configuration, over all rounds."""

    peer: Peer
    configuration: Configuration
    answers: list[Answers] = field(default_factory=list)
    """By round."""
    error: str | None = None
    """Why there are no more of them."""
    dates: list[str] = field(default_factory=list)
    """When each round ended."""
    commits: set[str] = field(default_factory=set)
    """Of Winnow, that the rounds were run at."""
    missing: int = 0
    """Rounds that another start has to run."""

    def take(self, row: dict[str, Any]) -> None:
        if row["result"] is None:
            self.error = row["error"]
        else:
            self.answers.append(Answers(**row["result"]))
            self.dates.append(row["date"])
            self.commits.add(row["commit"] or "unknown")

    @property
    def rates(self) -> list[float]:
        """Output tokens per second, by round."""
        return [sum(map(len, answers.tokens)) / answers.seconds for answers in self.answers]

    @property
    def median(self) -> float | None:
        """Output tokens per second; None where a round failed, since the others tell half of it."""
        return statistics.median(self.rates) if self.answers and self.error is None else None

    @property
    def versions(self) -> dict[str, str]:
        return self.answers[-1].versions if self.answers else {}

    def to_json(self, exam: Exam | None) -> dict[str, Any]:
        """Everything but the tokens, of which there is a hash for each round; scores are the first round's."""
        return {
            "peer": self.peer.name,
            "configuration": self.configuration.name,
            "kv_memory": self.configuration.kv_memory,
            "options": self.configuration.options,
            "versions": self.versions,
            "seconds": [answers.seconds for answers in self.answers],
            "cpu_seconds": [answers.cpu_seconds for answers in self.answers],
            "output_tokens": [sum(map(len, answers.tokens)) for answers in self.answers],
            "output_tokens_per_second": self.rates,
            "median": self.median,
            "scores": [] if exam is None or not self.answers else exam.scores(self.answers[0].tokens),
            "commits": sorted(self.commits),
            "dates": self.dates,
            "tokens_sha256": [
                hashlib.sha256(json.dumps(answers.tokens).encode()).hexdigest() for answers in self.answers
            ],
            "error": self.error,
        }


def parse_answers(output: str, work: Work) -> Answers:
    """Parse a peer's output. Raises PeerError: there is no report, or answers are missing or of a wrong length."""
    lines = output.strip().splitlines()
    try:
        answers = Answers(**json.loads(lines[-1]))
    except (IndexError, TypeError, ValueError):
        last = lines[-1][:200] if lines else ""
        raise PeerError(f"the script printed no report, its last line is {last!r}") from None
    # Some engines hand over the token that ended an answer.
    cut = [tokens[:-1] if tokens and tokens[-1] in work.end_tokens else tokens for tokens in answers.tokens]
    lengths = sorted(set(map(len, cut)))
    wrong = lengths[-1:] > [work.new_tokens] if work.end_tokens else lengths != [work.new_tokens]
    if len(cut) != len(work.prompts) or wrong:
        most = "at most " if work.end_tokens else ""
        raise PeerError(
            f"{len(work.prompts)} answers of {most}{work.new_tokens} tokens were asked for, "
            f"{len(cut)} of {lengths} came"
        )
    return replace(answers, tokens=cut)
