"""Standard output, for people and for other programs."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO, cast

from winnow.errors import UsageError
from winnow.report.provenance import typed_command


def show(*things: Any, stderr: bool = False, soft_wrap: bool = False) -> None:
    """Print what rich can render, text as it is, after the work: what a command is for lies elsewhere already, so that
    a reader who has left (`| head`) is no error."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # for which rich would end the process

    name = "standard error" if stderr else "standard output"
    stream = sys.stderr if stderr else sys.stdout
    if stream is None:
        raise UsageError(f"cannot write to {name}: it is closed")
    try:
        Screen(file=stream, markup=False, emoji=False).print(*things, sep="\n", soft_wrap=soft_wrap)
        stream.flush()
    except BrokenPipeError:
        silence(stream)
    except OSError as error:
        silence(stream)
        raise _cannot_write(name, error) from error


def facts_table(title: str, facts: Mapping[str, str]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", title=title, show_header=False, title_justify="left")
    for name, value in facts.items():
        table.add_row(name, Text(value))
    return table


def resume_hint() -> str:
    """Say how to resume a run that ends early: the command as typed, which must not start afresh again."""
    command = [word for word in typed_command() if word != "--overwrite"]
    return f"(finished answers are safe; resume with: {shlex.join(command)})"


@contextmanager
def named_standard_output() -> Iterator[None]:
    """Let what writes to standard output raise a UsageError that names it, where the disk is full and the like."""
    stream = sys.stdout
    if stream is not None:
        sys.stdout = cast(TextIO, _Named(stream, "standard output"))
    try:
        yield
    finally:
        sys.stdout = stream


class _Named:
    """A stream whose errors say which it is. A reader who leaves is no such error."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._stream, attribute)

    @property
    def buffer(self) -> Any:
        return _Named(self._stream.buffer, self._name)

    def write(self, data: Any) -> int:
        with self._naming():
            written: int = self._stream.write(data)
        return written

    def flush(self) -> None:
        with self._naming():
            self._stream.flush()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            silence(self._stream)
            raise _cannot_write(self._name, error) from error


def _cannot_write(name: str, error: OSError) -> UsageError:
    return UsageError(f"cannot write to {name}: {error.strerror}")


def occupy_standard_streams() -> None:
    """Open descriptors 0 to 2 that are closed: the next file would get the number, and what libraries print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    if sys.stderr is None:
        # What goes to no file goes to standard output.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it stays open)


def silence(stream: Any) -> None:
    """Discard what a broken stream still holds; Python would report it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
