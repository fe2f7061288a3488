"""Texts of a length that is asked for: what the model takes of it, and the largest that fits."""

from collections.abc import Callable

from winnow.errors import EvaluationError
from winnow_lab.evaluate.tasks.task import TaskSettings

_FIRST_GUESS = 16


def check_lengths(settings: TaskSettings) -> None:
    """Raise EvaluationError for a length that the model does not take, before texts of it are made."""
    for tokens in settings.tokens:
        if tokens > settings.max_model_len:
            raise EvaluationError(f"--tokens {tokens}: the model takes {settings.max_model_len} at most")


def largest_fitting(cost: Callable[[int], int], room: int) -> int | None:
    """Return a size that fits while the next one does not: `cost(size) <= room < cost(size + 1)`.

    None if size 0 does not fit.

    Args:
        cost: size -> tokens. Grows without bound and about evenly, which is what the guesses rely on; where it now and
            then falls, the size found need not be the largest of all that fit.
        room: most tokens.
    """
    at_zero = cost(0)
    if at_zero > room:
        return None
    fits, too_large = 0, None
    guess = _FIRST_GUESS
    while too_large is None or too_large - fits > 1:
        tokens = cost(guess)
        if tokens <= room:
            fits = guess
        else:
            too_large = guess
        step = (room - tokens) * guess // max(1, tokens - at_zero)
        guess = max(guess + step, fits + 1)
        if too_large is not None:
            guess = min(guess, too_large - 1)
    return fits
