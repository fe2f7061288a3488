"""Commands that are refused before they change a file."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest


def check_refused(
    main: Callable[[list[str]], int],
    commands: Mapping[str, str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command of `commands` prints one line that holds its message, and changes no file below `folder`."""

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = contents()
    for words, message in commands.items():
        assert main(words.split()) == 2, words
        error = capsys.readouterr().err
        assert error.startswith("winnow: error: ") and message in error and error.count("\n") == 1, error
        assert contents() == before, words
