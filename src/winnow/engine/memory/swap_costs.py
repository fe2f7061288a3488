"""What preempting costs: seconds to copy KVs to the host and back, against seconds to compute them again."""

from winnow.engine.plan import StepPlan

# What an observation weighs after each later one of its kind: about the last twenty count.
_MEMORY = 0.95
# Of a step's tokens, at least as many must be of prompts for it to say how fast these are computed.
_MOSTLY = 0.5


class Fit:
    """Fit of y = a u + b v by least squares, a and b not negative; weights fall by `memory` with each observation."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._uu = self._uv = self._vv = self._uy = self._vy = 0.0

    def add(self, u: float, v: float, y: float) -> None:
        sums = ((self._uu, u * u), (self._uv, u * v), (self._vv, v * v), (self._uy, u * y), (self._vy, v * y))
        self._uu, self._uv, self._vv, self._uy, self._vy = (self._memory * old + new for old, new in sums)

    def predict(self, u: float, v: float) -> float | None:
        """Return y; None: nothing was observed."""
        if not self._uu:
            return None
        a, b = self._uy / self._uu, 0.0
        determinant = self._uu * self._vv - self._uv * self._uv
        if determinant > 1e-6 * self._uu * self._vv:  # else all observations were alike, and say nothing of v
            fitted = (self._uy * self._vv - self._vy * self._uv) / determinant
            slope = (self._vy * self._uu - self._uy * self._uv) / determinant
            if fitted < 0:
                a, b = 0.0, self._vy / self._vv
            elif slope >= 0:
                a, b = fitted, slope
        return a * u + b * v


class SwapCosts:
    """Expected seconds of a copy and of recomputation, averaged with more weight on recent ones. None: not measured.

    Copies go at a rate of bytes a second in each direction. A step of n prompt tokens, whose queries read m KVs in each
    row, takes a n + b m seconds: attention over a long context makes recomputing it dearer than its length says. Tests
    and simulations fix costs by `seconds_per_byte` and `seconds_per_token`.
    """

    def __init__(self, seconds_per_byte: float | None = None, seconds_per_token: float | None = None) -> None:
        self._fixed = seconds_per_byte, seconds_per_token
        self._copied = {False: (0.0, 0.0), True: (0.0, 0.0)}  # by direction: bytes, seconds
        self._prompts = Fit(_MEMORY)

    def swap_seconds(self, nbytes: int) -> float | None:
        """Return the seconds of copying `nbytes` to the host and, later, back."""
        known = [seconds / copied for copied, seconds in self._copied.values() if copied]
        if self._fixed[0] is not None:
            known = [self._fixed[0]]
        # What was measured in one direction stands for the other, too, until that is measured.
        return 2 * nbytes * sum(known) / len(known) if known else None

    def recompute_seconds(self, num_tokens: int) -> float | None:
        """Return the seconds of computing the first `num_tokens` tokens of a sequence again."""
        if self._fixed[1] is not None:
            return num_tokens * self._fixed[1]
        return self._prompts.predict(num_tokens, _kvs_read(0, num_tokens))

    def record_copy(self, nbytes: int, seconds: float, *, back: bool) -> None:
        before_bytes, before_seconds = self._copied[back]
        self._copied[back] = before_bytes * _MEMORY + nbytes, before_seconds * _MEMORY + seconds

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        """Record a computed step; those in which prompts are few tell nothing."""
        if plan.num_tokens == len(plan.entries):
            return  # nobody computes a prompt, as in most steps
        chunks = [entry for entry in plan.entries if entry.count - entry.num_drafts > 1]
        if sum(entry.count for entry in chunks) > _MOSTLY * plan.num_tokens:
            read = sum(_kvs_read(entry.start, entry.end) for entry in chunks)
            self._prompts.add(plan.num_tokens, read, seconds)


def _kvs_read(start: int, end: int) -> float:
    """Return KVs that the queries of tokens start..end - 1 read in a row that holds all before them."""
    return (end - start) * (start + end + 1) / 2
