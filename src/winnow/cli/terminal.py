"""Standard output for people."""

import os
import sys
from typing import Any

from winnow.cli.errors import UsageError


def show(*things: Any, stderr: bool = False) -> None:
    """Print what rich can render, a line each, after the work: what a command is for lies elsewhere already.

    So a reader who has left (`| head`) is no error.

    Raises:
        UsageError: the stream is closed, or takes no more.
    """
    from rich.console import Console

    name = "standard error" if stderr else "standard output"
    stream = sys.stderr if stderr else sys.stdout
    if stream is None:
        raise UsageError(f"cannot write to {name}: it is closed")
    try:
        Console(file=stream, markup=False).print(*things, sep="\n")
        stream.flush()
    except BrokenPipeError:
        silence(stream)
    except OSError as error:
        silence(stream)
        raise UsageError(f"cannot write to {name}: {error.strerror}") from error


def silence(stream: Any) -> None:
    """Send what a broken stream still holds nowhere; else Python complains of it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
