"""The largest batch at which a method's answers are still good enough."""

from collections.abc import Callable, Sequence


def largest_that_holds(
    batches: Sequence[int], holds: Callable[[int], bool], guess: int | None = None
) -> int | None:
    """The largest of `batches`, ascending, for which `holds` is true; None: there is none.

    A larger batch leaves each prompt fewer KVs, so what holds is taken to hold at every smaller size, and what fails to
    fail at every larger one. The search asks `guess`, one of `batches` (left out: the one in the middle), then its
    neighbour, and halves what is left: a good guess costs two questions.
    """
    low, high = 0, len(batches)  # those before `low` hold, those from `high` on fail
    place = len(batches) // 2 if guess is None else batches.index(guess)
    step = 0
    while low < high:
        if holds(batches[place]):
            low, neighbour = place + 1, place + 1
        else:
            high, neighbour = place, place - 1
        place = neighbour if step == 0 and low <= neighbour < high else (low + high) // 2
        step += 1
    return batches[low - 1] if low else None
