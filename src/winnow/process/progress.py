"""Progress of a long piece of work, for a listener that a command sets; without one nothing is reported."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, int, int], None]
"""Takes what is being done, and how many parts of how many are done."""

_listener: ContextVar[Listener | None] = ContextVar("winnow_progress", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let a listener hear of what happens in this thread while this lasts."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(stage: str, done: int = 0, total: int = 1) -> None:
    """Say what is being done: `done` parts of `total`."""
    listener = _listener.get()
    if listener is not None:
        listener(stage, done, total)
