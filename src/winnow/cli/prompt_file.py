"""The file of prompts that `winnow run` reads, also where it is a stream."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from winnow.cli.flags.paths import STANDARD
from winnow.errors import UsageError


@contextmanager
def open_prompts(path: Path) -> Iterator[Path]:
    """Yield a file with the prompts of `path`: itself, or a copy of what a stream holds, which is gone at the end.
    Raises UsageError: the stream cannot be read or kept."""
    is_standard = str(path) == STANDARD
    if not is_standard and (path.is_file() or path.is_dir() or not path.exists()):
        yield path
        return
    with NamedTemporaryFile(prefix="winnow-prompts-", suffix=".jsonl") as copy:
        try:
            if is_standard:
                if sys.stdin is None:
                    raise UsageError("cannot read the prompts from standard input: it is closed")
                shutil.copyfileobj(sys.stdin.buffer, copy)
            else:
                with path.open("rb") as stream:
                    shutil.copyfileobj(stream, copy)
            copy.flush()
        except OSError as error:
            raise UsageError(f"cannot read the prompts {path} into {copy.name}: {error.strerror}") from error
        yield Path(copy.name)
