"""Perplexity under eviction: each window's context is computed and cut, and what follows is forced token by token.

Rounds fall as in an answer of that length. Only forced tokens count. The full cache is measured the same way.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Self

from winnow.errors import InvalidRequestError
from winnow_lab.evaluate.likelihood import Keeping, Likelihood, Pair, score_pairs
from winnow_lab.evaluate.plan import engine_identity
from winnow_lab.study.journal import ResultJournal

if TYPE_CHECKING:
    from winnow.llm import LLM


@dataclass(frozen=True)
class WindowScore:
    """One window under one way of keeping KVs.

    Attributes:
        name: of the way.
        window: its place in the text.
        nats: negative log-likelihood of the forced tokens together.
        tokens: how many were forced.
        mean_kept: KVs per row at the window's end.
        kv_bytes: of the blocks that held them.
        rounds: of eviction.
    """

    name: str
    window: int
    nats: float
    tokens: int
    mean_kept: float
    kv_bytes: int
    rounds: int

    @property
    def key(self) -> tuple[str, int]:
        """Window and name."""
        return self.name, self.window

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the reverse of `to_json`; JSON has null for a text that the model ruled out."""
        return cls(**{**values, "nats": math.inf if values["nats"] is None else values["nats"]})


@dataclass(frozen=True)
class Change:
    """A perplexity over another one; the standard error is over windows, None where there is one only."""

    ratio: float
    error: float | None


@dataclass(frozen=True)
class Perplexity:
    """Losses of all windows under one way of keeping KVs, in order; None where the engine refused it, and why."""

    name: str
    scores: tuple[WindowScore, ...]
    refusal: str | None = None

    @property
    def tokens(self) -> int:
        """Number of forced tokens, which are those that count."""
        return sum(score.tokens for score in self.scores)

    @property
    def value(self) -> float | None:
        """exp(nats per forced token); None where refused."""
        return math.exp(sum(score.nats for score in self.scores) / self.tokens) if self.scores else None

    @property
    def mean_kept(self) -> float | None:
        """KVs per row at a window's end, on average."""
        return fmean(score.mean_kept for score in self.scores) if self.scores else None

    @property
    def kv_bytes(self) -> float | None:
        """Bytes held at a window's end, on average."""
        return fmean(score.kv_bytes for score in self.scores) if self.scores else None

    def over(self, reference: "Perplexity") -> Change | None:
        """Return this one divided by the other on the same windows; None where one of them was refused."""
        if not self.scores or not reference.scores:
            return None
        pairs = zip(self.scores, reference.scores, strict=True)
        more = [(mine.nats - theirs.nats) / mine.tokens for mine, theirs in pairs]
        ratio = math.exp(fmean(more))
        return Change(ratio, ratio * stdev(more) / math.sqrt(len(more)) if len(more) > 1 else None)

    def to_json(self) -> dict[str, Any]:
        """Return every number, and what follows from them."""
        if self.refusal is not None:
            return {"name": self.name, "refused": self.refusal}
        return {
            "name": self.name,
            "perplexity": self.value,
            "tokens": self.tokens,
            "mean_kept": self.mean_kept,
            "kv_bytes": self.kv_bytes,
            "windows": [score.to_json() for score in self.scores],
        }


def measure_perplexity(
    llm: "LLM",
    windows: Sequence[Pair],
    keepings: Mapping[str, Keeping],
    *,
    known: Collection[WindowScore] = (),
    on_score: Callable[[WindowScore], None] = lambda score: None,
    on_step: Callable[[int, str], None] = lambda done, name: None,
) -> list[Perplexity]:
    """Return the perplexity of the windows' continuations under each way of keeping KVs, in the order of `keepings`.

    Args:
        windows: all of one length, see `winnow_lab.evaluate.wikitext.cut_windows`.
        keepings: by name.
        known: scores of an earlier call, which are not computed again.
        on_score: called with every new score as soon as it is there.
        on_step: called after every step of the engine, with the number of scores that are there and the name of the way
            that is being measured.

    Raises:
        EvaluationError: a window lacks context or continuation.
        InvalidRequestError: the engine refuses every way; says why it refuses the first.
    """
    scores = {score.key: score for score in known}
    refusals: dict[str, str] = {}
    for name, keeping in keepings.items():
        tell = partial(_tell, on_step, scores, name)
        left = [place for place in range(len(windows)) if (name, place) not in scores]
        try:
            for index, found in score_pairs(llm, [windows[place] for place in left], keeping, on_step=tell):
                score = _score(llm, name, left[index], windows[left[index]], found)
                scores[score.key] = score
                on_score(score)
        except InvalidRequestError as error:
            refusals[name] = str(error).removeprefix("pairs[0]: ")  # windows are alike
            if len(refusals) == len(keepings):
                raise
    return [
        Perplexity(name, (), refusals[name])
        if name in refusals
        else Perplexity(name, tuple(scores[name, place] for place in range(len(windows))))
        for name in keepings
    ]


def window_journal(
    llm: "LLM", windows: Sequence[Pair], path: Path, *, overwrite: bool = False
) -> ResultJournal[WindowScore]:
    """Open the journal of these windows' scores under this engine; errors are those of `ResultJournal`."""
    digest = hashlib.sha256(json.dumps([vars(window) for window in windows]).encode()).hexdigest()
    identity = engine_identity(llm, digest, {"task": "perplexity"})
    return ResultJournal(path, identity, WindowScore.from_json, overwrite=overwrite, answers_alone=True)


def resumed_perplexity(
    llm: "LLM", windows: Sequence[Pair], keepings: Mapping[str, Keeping], path: Path
) -> list[Perplexity]:
    """Return what `measure_perplexity` does, but for scores that a journal has; new ones are added to it."""
    with window_journal(llm, windows, path) as journal:
        return measure_perplexity(
            llm, windows, keepings, known=journal.found, on_score=lambda score: journal.append([score])
        )


def _tell(on_step: Callable[[int, str], None], scores: Collection[object], name: str) -> None:
    on_step(len(scores), name)


def _score(llm: "LLM", name: str, place: int, window: Pair, found: Likelihood) -> WindowScore:
    report = found.eviction
    computed = len(window.context) + len(window.continuation) - 1
    return WindowScore(
        name=name,
        window=place,
        nats=-found.total,
        tokens=len(found.logprobs),
        mean_kept=float(computed) if report is None else report.mean_kept,
        kv_bytes=llm.kv_bytes(computed) if report is None else report.bytes_held,
        rounds=0 if report is None else report.rounds,
    )
