"""WHAT preempting costs: seconds to copy KVs to the host and back, against seconds to compute them again."""

from typing import Protocol

from winnow.engine.plan import StepPlan

# What an observation weighs after each later one of its kind: about the last twenty count.
_MEMORY = 0.95
# Of a step's tokens, at least as many must be of prompts for it to say how fast these are computed.
_MOSTLY = 0.5


class SwapCosts(Protocol):
    """Expected seconds of a copy and of recomputation. None: not measured yet."""

    def swap_seconds(self, nbytes: int) -> float | None:
        """Return the seconds of copying `nbytes` to the host and, later, back."""

    def recompute_seconds(self, num_tokens: int) -> float | None:
        """Return the seconds of computing the first `num_tokens` tokens of a sequence again."""

    def record_copy(self, nbytes: int, seconds: float, *, back: bool) -> None:
        """Record a copy to the host, or `back` from it."""

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        """Record a computed step."""


class MeasuredCosts:
    """Costs measured on copies and on steps of prompts, averaged with more weight on recent ones.

    Copies go at a rate of bytes a second in each direction. A step of n prompt tokens, whose queries read m KVs in each
    row, takes a n + b m seconds, where a and b are fitted by least squares and not negative: attention over a long
    context is what makes recomputing it dearer than its length says.
    """

    def __init__(self) -> None:
        self._copied = {False: (0.0, 0.0), True: (0.0, 0.0)}  # by direction: bytes, seconds
        # Sums of squares and products of n, m and seconds.
        self._nn = self._nm = self._mm = self._nt = self._mt = 0.0

    def swap_seconds(self, nbytes: int) -> float | None:
        seconds = [_per_byte(*self._copied[back]) for back in (False, True)]
        known = [each for each in seconds if each is not None]
        # What was measured in one direction stands for the other, too, until that is measured.
        return 2 * nbytes * sum(known) / len(known) if known else None

    def recompute_seconds(self, num_tokens: int) -> float | None:
        if not self._nn:
            return None
        per_token, per_kv = self._fitted()
        return per_token * num_tokens + per_kv * _kvs_read(0, num_tokens)

    def record_copy(self, nbytes: int, seconds: float, *, back: bool) -> None:
        before_bytes, before_seconds = self._copied[back]
        self._copied[back] = before_bytes * _MEMORY + nbytes, before_seconds * _MEMORY + seconds

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        if plan.num_tokens == len(plan.entries):
            return  # nobody computes a prompt, as in most steps
        chunks = [entry for entry in plan.entries if entry.count - entry.num_drafts > 1]
        if sum(entry.count for entry in chunks) <= _MOSTLY * plan.num_tokens:
            return
        n = float(plan.num_tokens)
        m = sum(_kvs_read(entry.start, entry.end) for entry in chunks)
        sums = (
            (self._nn, n * n),
            (self._nm, n * m),
            (self._mm, m * m),
            (self._nt, n * seconds),
            (self._mt, m * seconds),
        )
        self._nn, self._nm, self._mm, self._nt, self._mt = (old * _MEMORY + new for old, new in sums)

    def _fitted(self) -> tuple[float, float]:
        """Return seconds per token, and per KV read."""
        determinant = self._nn * self._mm - self._nm * self._nm
        if determinant > 1e-6 * self._nn * self._mm:  # else all steps were alike, and say nothing of m
            per_token = (self._nt * self._mm - self._mt * self._nm) / determinant
            per_kv = (self._mt * self._nn - self._nt * self._nm) / determinant
            if per_kv >= 0 and per_token >= 0:
                return per_token, per_kv
            if per_token < 0:
                return 0.0, self._mt / self._mm
        return self._nt / self._nn, 0.0


class FixedCosts:
    """Costs as they are given, for tests and simulations."""

    def __init__(self, seconds_per_byte: float, seconds_per_token: float) -> None:
        self.seconds_per_byte, self.seconds_per_token = seconds_per_byte, seconds_per_token

    def swap_seconds(self, nbytes: int) -> float | None:
        return 2 * nbytes * self.seconds_per_byte

    def recompute_seconds(self, num_tokens: int) -> float | None:
        return num_tokens * self.seconds_per_token

    def record_copy(self, nbytes: int, seconds: float, *, back: bool) -> None:
        pass

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        pass


def _per_byte(nbytes: float, seconds: float) -> float | None:
    return seconds / nbytes if nbytes else None


def _kvs_read(start: int, end: int) -> float:
    """Return KVs that the queries of tokens start..end - 1 read in a row that holds all before them."""
    return (end - start) * (start + end + 1) / 2
