"""Whether drafts pay: tokens a second with and without them, by number of sequences, from steps as they were."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from winnow.cache.layout import IntArray
from winnow.outputs import DraftRates

# Steps of a kind that count: the last ones.
_RECENT = 16
# Steps of a look at drafts while none are made, and at none while they are.
_LOOK = {True: 4, False: 2}
# Steps between looks, at least.
_SPACING = 16
# Part of the time that looks may lose, and steps without drafts that they may take at once.
_SHARE, _SAVED = 0.007, 4
# A draft model has to compute a sequence before its first drafts; so much of it counts, in steps.
_HELD_UP = 16
# Drafts of a look, and what it takes to compute a sequence before them, in drafts.
_FIRST = 16
# Drafts have to gain as much, lest noise decides.
_GAIN = 1.02
# Numbers of drafts that are compared, beside all.
_NUMBERS = np.unique([0, *(2**i for i in range(20)), *(3 * 2**i for i in range(20))])
# Chance of a draft below which a look leaves it out.
_LEAST_CHANCE = 0.3


def upper_bound(number: int) -> int:
    """Return the largest number that is measured together with this one: up to 4 each by itself, then two an octave."""
    if number <= 4:
        return number
    below = 1 << (number - 1).bit_length() - 1
    return below * 3 // 2 if number <= below * 3 // 2 else 2 * below


class Chance:
    """Chance that a draft is accepted if those before it are; recent ones weigh more."""

    def __init__(self, memory: float, accepted: float = 0.0, tried: float = 0.0) -> None:
        self._memory, self._accepted, self._tried = memory, accepted, tried

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Record a verified proposal: what follows the first rejected draft was not tried."""
        self._accepted = self._accepted * self._memory + num_accepted
        self._tried = self._tried * self._memory + min(num_accepted + 1, num_drafts)

    def expect(self, prior: float, weight: float = 2.0) -> float:
        """Return the chance, from `prior` where little was tried."""
        return (self._accepted + weight * prior) / (self._tried + weight)


class _Steps:
    """The last steps of a kind, what they count and how long they took; `middle` is the median of the seconds. A step
    counts at most `most` medians, if something else held it up."""

    def __init__(self, most: int = 3) -> None:
        self._most = most
        self._steps = deque[tuple[float, float]](maxlen=_RECENT)
        self.count = self.middle = 0.0
        self.rate: float | None = None
        """Counted a second; None: not measured."""

    def add(self, count: float, seconds: float) -> None:
        steps = self._steps
        steps.append((count, seconds))
        self.middle = sorted([each for _, each in steps])[len(steps) // 2]
        total = sum([each for each, _ in steps])
        self.count = total / len(steps)
        if len(steps) > 1:
            self.rate = total / sum([min(each, self._most * self.middle) for _, each in steps])


@dataclass
class _Batch:
    """Steps of about as many sequences.

    Attributes:
        arms: by whether they might have had drafts, tokens of steps.
        times: by about how many, drafts of steps.
        costs: seconds that the last look with drafts (True) and without lost.
    """

    arms: dict[bool, _Steps] = field(default_factory=lambda: {False: _Steps(), True: _Steps(most=_HELD_UP)})
    times: dict[int, _Steps] = field(default_factory=dict)
    costs: dict[bool, float] = field(default_factory=dict)

    @property
    def pays(self) -> bool | None:
        """Whether drafts pay; None: not known."""
        plain, drafted = self.arms[False].rate, self.arms[True].rate
        return None if plain is None or drafted is None else drafted > _GAIN * plain

    def seconds(self, numbers: IntArray) -> NDArray[np.float64] | None:
        """Predict the seconds of steps with these numbers of drafts; None: none with any was measured."""
        if len(self.times) < 2:
            return None
        at, times = np.array([(each.count, each.middle) for _, each in sorted(self.times.items())]).T
        times = np.maximum.accumulate(times)
        slope = (times[-1] - times[-2]) / (at[-1] - at[-2])
        found: NDArray[np.float64] = np.interp(numbers, at, times) + np.maximum(numbers - at[-1], 0) * slope
        return found


@dataclass
class _Look:
    """Steps that are done otherwise than seems best, to measure them."""

    batch: int
    drafts: bool
    left: int
    lost: float = 0.0
    gained: int = 0


class DraftGate:
    """Decisions how many tokens are proposed in a step, so that drafts never cost more than they bring.

    Two things are measured. Tokens a second of steps with and without drafts, by number of sequences, decide whether
    any are made; the other way is looked at now and then, for 0.7 % of all time. Where they are made, a step takes
    those of the greatest chance, as many as its time by number of drafts lets expect the most tokens a second from.
    Unless `adaptive`, all that is proposed is computed. The `price` of a draft, as a part of a step's seconds, says
    what a first look costs.
    """

    def __init__(self, *, adaptive: bool = True, price: float = 0.0) -> None:
        self.adaptive = adaptive
        # In steps. A look that ends at once makes half as many; it may seem to cost less than it does, by chance.
        self._first_cost, self._least_cost = 1 + _FIRST * price, _FIRST * price / 2
        self._batches: dict[int, _Batch] = {}
        self._look: _Look | None = None
        self._since = 0
        # Seconds that looks may still lose; None: nothing is measured yet.
        self._credit: float | None = None

    def drafts(self, num_sequences: int) -> bool:
        """Return whether the next step, of this number of sequences, may have drafts."""
        if not self.adaptive:
            return True
        bound = upper_bound(num_sequences)
        if self._look is not None and self._look.batch == bound:
            return self._look.drafts
        batch = self._batches.get(bound)  # first of all is measured what steps take without
        return batch is not None and batch.arms[False].rate is not None and self._pays(bound)

    def _pays(self, bound: int) -> bool:
        # Where nothing is known, what holds for the next number of sequences.
        for near in sorted(self._batches, key=lambda each: abs(each - bound)):
            pays = self._batches[near].pays
            if pays is not None:
                return pays
        return False

    def allot(self, num_sequences: int, rooms: Sequence[int], chances: Sequence[float]) -> list[int]:
        """Return how many drafts each sequence gets in a step that may have some, at most as its room allows.

        `num_sequences` counts those without room too; each of `chances` is that a draft is accepted if those before it
        are.
        """
        total = sum(rooms)
        if not self.adaptive or not total:
            return list(rooms)
        depth = np.arange(1, max(rooms) + 1)
        survival = np.where(depth <= np.array(rooms)[:, None], np.array(chances)[:, None] ** depth, 0.0)
        order = np.argsort(-survival, axis=None, kind="stable")[:total]
        gains = survival.ravel()[order]
        bound = upper_bound(num_sequences)
        batch = self._batches.get(bound, _Batch())
        count = 0
        # A few steps do not tell what many more drafts take.
        most = min(total, 2 * max(batch.times, default=0))
        numbers = np.append(_NUMBERS[: np.searchsorted(_NUMBERS, most)], most)
        seconds = batch.seconds(numbers)
        if seconds is not None:
            tokens = num_sequences + np.concatenate([[0.0], np.cumsum(gains)])[numbers]
            count = int(numbers[np.argmax(tokens / seconds)])
        looks = self._look is not None and self._look.batch == bound
        if not count and (seconds is None or looks):
            likely = int((gains >= _LEAST_CHANCE).sum())
            count = min(max(likely, 1), max(num_sequences // 4, max(rooms)))
        taken = np.zeros(survival.size, dtype=np.int64)
        taken[order[:count]] = 1
        counts: list[int] = taken.reshape(survival.shape).sum(1).tolist()
        return counts

    def record(
        self, num_sequences: int, drafts: bool, num_drafts: int, num_tokens: int, seconds: float
    ) -> None:
        """Record a step in which all decode; `drafts` says whether it might have had some.

        It added `num_tokens` to answers in the seconds since the step before it ended.
        """
        if not self.adaptive or seconds <= 0:
            return
        bound = upper_bound(num_sequences)
        batch = self._batches.setdefault(bound, _Batch())
        batch.arms[drafts].add(num_tokens, seconds)
        batch.times.setdefault(upper_bound(num_drafts), _Steps()).add(num_drafts, seconds)
        look = self._look
        self._save(batch, _SHARE * seconds)
        if look is None or look.batch != bound:
            self._look = None
            self._since += 1
            self._begin_look(bound, batch)
        elif look.drafts == drafts:  # else it was submitted before the look began
            other = batch.arms[not drafts].rate
            look.lost += 0.0 if other is None else seconds - num_tokens / other
            look.gained += num_tokens - num_sequences
            look.left -= 1
            # Where nothing was right so far, it is enough to have seen a few.
            hopeless = drafts and not look.gained and look.lost > batch.arms[False].middle
            if not look.left or (hopeless and batch.arms[True].rate is not None):
                least = self._least_cost * batch.arms[False].middle if drafts else 0.0
                batch.costs[drafts] = cost = max(look.lost, least)
                self._save(batch, -cost)
                self._look, self._since = None, 0

    def _save(self, batch: _Batch, seconds: float) -> None:
        if batch.arms[False].rate is not None:
            step = batch.arms[False].middle
            most = max([_SAVED * step, self._first_cost * step, *batch.costs.values()])
            self._credit = _SAVED * step if self._credit is None else min(self._credit + seconds, most)

    def _begin_look(self, bound: int, batch: _Batch) -> None:
        if self._credit is None:
            return
        drafts = not self._pays(bound)
        if self._since < (2 if batch.arms[drafts].rate is None else _SPACING):
            return
        first = (self._first_cost if drafts else 1) * batch.arms[False].middle
        if batch.costs.get(drafts, first) <= self._credit:
            self._look = _Look(bound, drafts, _LOOK[drafts])

    @property
    def looks(self) -> bool:
        """Whether drafts of this step are made to be measured, and not since they pay."""
        return self._look is not None

    def rates(self) -> list[DraftRates]:
        return [
            DraftRates(bound, self._pays(bound), batch.arms[False].rate, batch.arms[True].rate)
            for bound, batch in sorted(self._batches.items())
        ]
