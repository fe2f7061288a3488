"""Paths that a command will write to."""

from pathlib import Path

from winnow.cli.errors import UsageError


def require_writable(path: Path, name: str) -> None:
    """Refuse a path that would be found unusable only after the work. It is called `name` to the user.

    Raises:
        UsageError: names the path.
    """
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"cannot write {name}: {error.strerror}") from error
    if not there:
        path.unlink()
