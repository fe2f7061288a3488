"""Progress of a long piece of work: for a listener that a command sets, or as a bar on a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, int, int, str], None]
"""Takes what is being done, how many parts of how many are done, and their unit: B for bytes, else empty."""

_listener: ContextVar[Listener | None] = ContextVar("winnow_progress", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(stage: str, done: int = 0, total: int = 1, unit: str = "") -> None:
    reporter()(stage, done, total, unit)


def reporter() -> Listener:
    """Return what hears this context's reports, for threads that have another."""
    return _listener.get() or (lambda stage, done, total, unit: None)


@contextmanager
def progress_bar(total: int, num_tokens: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr. Yields a function that takes how many of `total` prompts are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("Processed prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[speed]}"),
    )
    start, before = time.monotonic(), num_tokens()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, speed="")

        def show(done: int) -> None:
            rate = (num_tokens() - before) / max(time.monotonic() - start, 1e-9)
            bar.update(task, completed=done, speed=f"{rate:.1f} tokens/s")

        yield show


def is_shown() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
