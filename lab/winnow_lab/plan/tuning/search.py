"""Successive halving: many candidates on few prompts, the better ones on more, the winner on prompts held back."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from winnow.config import FULL
from winnow.errors import InvalidRequestError, RequestFailedError
from winnow_lab.plan.tuning.measure import Answer, Candidate, Trial, TunePrompt, agreement, run

if TYPE_CHECKING:
    from winnow.llm import LLM

OpenEngine = Callable[[Mapping[str, Any]], "LLM"]
HELD_BACK = "held back"
THROUGHPUT, BYTES = "throughput", "bytes"


@dataclass(frozen=True)
class Search:
    """Options of a search.

    Attributes:
        target: agreement to keep, above 0 and at most 1.
        kind: what agreement means, `exact` or `tokens`.
        first: prompts of the first rung; each rung has twice as many.
        held_back: part of the prompts that choose nothing, and tell whether the promise holds.
        seed: of which prompts these are.
    """

    target: float
    kind: str = "tokens"
    objective: str = THROUGHPUT
    first: int = 4
    held_back: float = 0.34
    seed: int = 0

    def split(self, prompts: Sequence[TunePrompt]) -> tuple[list[TunePrompt], list[TunePrompt]]:
        """The prompts to search with, and those held back: at least one each, of two or more."""
        order = list(range(len(prompts)))
        random.Random(self.seed).shuffle(order)
        count = min(max(round(len(order) * self.held_back), 1), len(order) - 1)
        return [prompts[i] for i in order[count:]], [prompts[i] for i in order[:count]]

    def rungs(self, count: int) -> list[int]:
        sizes, size = [], min(self.first, count)
        while size < count:
            sizes.append(size)
            size *= 2
        return [*sizes, count]

    def cost(self, trial: Trial) -> float:
        return trial.kv_bytes if self.objective == BYTES else -trial.rate

    def keeps(self, trial: Trial) -> bool:
        return trial.error is None and trial.mean >= self.target

    def order(self, trial: Trial) -> tuple[bool, float]:
        """A sort key, the best first: those that reach the target before others."""
        return not self.keeps(trial), self.cost(trial)


@dataclass
class Tuner:
    """Runner of a search; `found` are trials of an earlier run, which are not repeated."""

    search: Search
    open_engine: OpenEngine
    record: Callable[[Trial], None] = lambda trial: None
    found: Sequence[Trial] = ()
    trials: list[Trial] = field(default_factory=list)
    _engine: "tuple[dict[str, Any], LLM] | None" = None
    _full: dict[str, list[Answer]] = field(default_factory=dict)

    def tune(self, candidates: Sequence[Candidate], prompts: Sequence[TunePrompt]) -> "Tuned":
        try:
            return self._tune(candidates, prompts)
        finally:
            self._close()

    def _tune(self, candidates: Sequence[Candidate], prompts: Sequence[TunePrompt]) -> "Tuned":
        search = self.search
        chosen, held_back = search.split(prompts)
        alive = list(candidates)
        ranked: list[Trial] = []
        for size in search.rungs(len(chosen)):
            some = chosen[:size]
            tried = [self._try(each, f"{size} prompts", some) for each in sorted(alive, key=_engine_first)]
            ranked = sorted((t for t in tried if t.error is None), key=search.order)
            possible = [t for t in ranked if t.bounds[1] >= search.target or t.candidate.eviction == FULL]
            if size < len(chosen):
                kept = possible[: max(math.ceil(len(alive) / 2), 1)]
                # The full cache keeps its answers, so it stays to fall back on.
                kept += [t for t in possible if t.candidate.eviction == FULL and t not in kept][:1]
                alive = [t.candidate for t in kept]
        finalists = [t for t in ranked if search.keeps(t)]
        for trial in finalists:
            check = self._try(trial.candidate, HELD_BACK, held_back)
            if search.keeps(check):
                return Tuned(search, trial, check, tuple(self.trials))
        return Tuned(search, None, None, tuple(self.trials))

    def _try(self, candidate: Candidate, stage: str, prompts: Sequence[TunePrompt]) -> Trial:
        trial = next((t for t in self.found if (t.candidate, t.stage) == (candidate, stage)), None)
        if trial is None:
            trial = self._measure(candidate, stage, prompts)
            self.record(trial)
        self.trials.append(trial)
        return trial

    def _measure(self, candidate: Candidate, stage: str, prompts: Sequence[TunePrompt]) -> Trial:
        full = self._full_answers(candidate, stage, prompts)
        try:
            answers, seconds, peak = run(self._open(candidate), candidate, prompts)
        except (InvalidRequestError, RequestFailedError) as error:
            return Trial(candidate, stage, error=str(error))
        agreed = tuple(
            agreement(prompt, answer, own, self.search.kind)
            for prompt, answer, own in zip(prompts, answers, full, strict=True)
        )
        tokens = sum(len(answer.token_ids) for answer in answers)
        return Trial(candidate, stage, agreed, seconds, tokens, peak)

    def _full_answers(self, candidate: Candidate, stage: str, prompts: Sequence[TunePrompt]) -> list[Answer]:
        """The full cache's answers to a stage's prompts, KVs stored as the model has them."""
        if stage not in self._full:
            reference = Candidate(FULL, None, candidate.max_num_seqs)
            self._full[stage], _, _ = run(self._open(reference), reference, prompts)
        return self._full[stage]

    def _open(self, candidate: Candidate) -> "LLM":
        if self._engine is None or self._engine[0] != candidate.engine:
            self._close()
            self._engine = candidate.engine, self.open_engine(candidate.engine)
        return self._engine[1]

    def _close(self) -> None:
        if self._engine is not None:
            self._engine[1].close()
            self._engine = None


@dataclass(frozen=True)
class Tuned:
    """Result of a search.

    Attributes:
        best: the winner's last trial of the search; None: not even the full cache agrees with itself.
        check: its trial on the prompts held back.
    """

    search: Search
    best: Trial | None
    check: Trial | None
    trials: tuple[Trial, ...]

    @property
    def checked(self) -> int:
        """Candidates that were tried on the prompts held back, the last of which is `best`."""
        return sum(trial.stage == HELD_BACK for trial in self.trials)

    @property
    def full(self) -> Trial | None:
        """The full cache's trial over the most prompts, the fastest of several."""
        return next((trial for trial in self.last if trial.candidate.eviction == FULL), None)

    @property
    def last(self) -> list[Trial]:
        """The trial over the most prompts of each candidate that was tried, best first; held-back ones apart."""
        latest: dict[Candidate, Trial] = {}
        for trial in self.trials:
            if trial.stage != HELD_BACK:
                latest[trial.candidate] = trial
        return sorted(latest.values(), key=lambda t: (-len(t.agreement), *self.search.order(t)))

    def pareto(self) -> list[Trial]:
        """Those of `last` with most prompts that none beats in both agreement and objective, by agreement."""
        trials = [t for t in self.last if t.error is None]
        most = max((len(t.agreement) for t in trials), default=0)
        trials = [t for t in trials if len(t.agreement) == most]
        front = [
            t
            for t in trials
            if not any(
                o.mean >= t.mean
                and self.search.cost(o) <= self.search.cost(t)
                and (o.mean, -self.search.cost(o)) != (t.mean, -self.search.cost(t))
                for o in trials
            )
        ]
        return sorted(front, key=lambda t: t.mean)


def _engine_first(candidate: Candidate) -> tuple[int, str, str]:
    """A sort key that opens each engine once."""
    return candidate.max_num_seqs, candidate.kv_cache_dtype, str(candidate)
