"""Perplexity under eviction: each window's context is computed and cut, and what follows is forced token by token.

Rounds fall as in an answer of that length. Only forced tokens count. The full cache is measured the same way.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from winnow.errors import InvalidRequestError
from winnow.llm import LLM
from winnow.report.fingerprint import Fingerprint
from winnow.values.units import format_bytes
from winnow_lab.evaluate.likelihood import Keeping, Likelihood, Pair, score_pairs
from winnow_lab.evaluate.plan import engine_identity
from winnow_lab.report import standard_error
from winnow_lab.report.tables import Footnotes, TextTable
from winnow_lab.study.journal import ResultJournal

NOTE = """\
Of each window the first tokens are given: they are computed, and a policy cuts their KVs before it has seen what
follows. The others are forced one by one, with the policy's rounds in between; they alone count. "of full" is a
perplexity over that of the full cache on the same windows, with the standard error over windows."""


@dataclass(frozen=True)
class WindowScore:
    """One window under one way of keeping KVs.

    Attributes:
        window: its place in the text.
        nats: negative log-likelihood of the forced tokens together.
        tokens: how many were forced.
        mean_kept: KVs per row at the window's end.
        kv_bytes: of the blocks that held them.
    """

    name: str
    window: int
    nats: float
    tokens: int
    mean_kept: float
    kv_bytes: int
    rounds: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`; JSON has null for a text that the model ruled out."""
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
        """This one divided by the other on the same windows; None where one of them was refused."""
        if not self.scores or not reference.scores:
            return None
        pairs = zip(self.scores, reference.scores, strict=True)
        more = [(mine.nats - theirs.nats) / mine.tokens for mine, theirs in pairs]
        ratio, error = math.exp(fmean(more)), standard_error(more)
        return Change(ratio, None if error is None else ratio * error)

    def to_json(self) -> dict[str, Any]:
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
    llm: LLM,
    windows: Sequence[Pair],
    keepings: Mapping[str, Keeping],
    *,
    known: Collection[WindowScore] = (),
    on_score: Callable[[WindowScore], None] = lambda score: None,
    on_step: Callable[[int, str], None] = lambda done, name: None,
) -> list[Perplexity]:
    """The perplexity of the windows' continuations under each way of keeping KVs, in the order of `keepings`.

    Args:
        windows: all of one length, see `winnow_lab.evaluate.wikitext.cut_windows`.
        known: scores of an earlier call, which are not computed again.
        on_step: called after every step of the engine, with the number of scores that are there and the name of the way
            that is being measured.

    Raises:
        InvalidRequestError: the engine refuses every way; says why it refuses the first.
    """
    scores = {(score.name, score.window): score for score in known}
    refusals: dict[str, str] = {}
    for name, keeping in keepings.items():
        left = [place for place in range(len(windows)) if (name, place) not in scores]

        def tell(name: str = name) -> None:
            on_step(len(scores), name)

        try:
            for index, found in score_pairs(llm, [windows[place] for place in left], keeping, on_step=tell):
                score = _score(llm, name, left[index], windows[left[index]], found)
                scores[name, left[index]] = score
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


def windows_identity(llm: LLM, windows: Sequence[Pair]) -> Fingerprint:
    """Return what must not change between the starts of a measurement."""
    digest = hashlib.sha256(json.dumps([vars(window) for window in windows]).encode()).hexdigest()
    return engine_identity(llm, digest, {"task": "perplexity"})


def window_journal(llm: LLM, windows: Sequence[Pair], path: Path) -> ResultJournal[WindowScore]:
    return ResultJournal(path, windows_identity(llm, windows), WindowScore.from_json, answers_alone=True)


def resumed_perplexity(
    llm: LLM, windows: Sequence[Pair], keepings: Mapping[str, Keeping], path: Path
) -> list[Perplexity]:
    """Return what `measure_perplexity` does, but for scores that a journal has; new ones are added to it."""
    with window_journal(llm, windows, path) as journal:
        return measure_perplexity(
            llm, windows, keepings, known=journal.found, on_score=lambda score: journal.append([score])
        )


def _score(llm: LLM, name: str, place: int, window: Pair, found: Likelihood) -> WindowScore:
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


def perplexity_table(rows: Sequence[Perplexity], title: str) -> TextTable:
    """A row for each way of keeping KVs; the first one is what the others are compared with."""
    notes = Footnotes()

    def entries(row: Perplexity) -> tuple[str, ...]:
        if row.value is None or row.mean_kept is None or row.kv_bytes is None:
            return notes.mark(row.refusal or ""), "", "", ""
        change = None if row is rows[0] else row.over(rows[0])
        ratio = "" if change is None else f"{change.ratio:.3f}"
        if change is not None and change.error is not None:
            ratio += f" ± {change.error:.3f}"
        return f"{row.value:.2f}", ratio, f"{row.mean_kept:,.0f}", format_bytes(round(row.kv_bytes))

    lines = tuple((row.name, entries(row)) for row in rows)
    columns = ("perplexity", "of full", "KVs per row", "KV memory")
    return TextTable(title, "preset", columns, lines, notes.lines())
