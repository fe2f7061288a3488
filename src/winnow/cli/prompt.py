"""Prompts that a command line names: one, or a file of them."""

import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from winnow.cli.flags.paths import STANDARD
from winnow.errors import UsageError
from winnow.media.decode import decode_image


def read_prompt(argument: str | None, file: str | None = None) -> str:
    """Return the text of the prompt. Raises UsageError: it is missing, given twice, empty, unreadable or not UTF-8."""
    if (argument is None) == (file is None):
        raise UsageError("give the prompt either as PROMPT or by --file")
    name = "PROMPT" if file is None else f"--file {file}"
    typed = file is None and argument != "-"
    try:
        if argument == "-" or file == "-":
            if sys.stdin is None:
                raise UsageError("cannot read the prompt from standard input: it is closed")
            data = sys.stdin.buffer.read()
        elif file is not None:
            data = Path(file).read_bytes()
        else:
            # Bytes that were no UTF-8 on the command line arrive as lone surrogates, which do not encode.
            data = str(argument).encode()
        # Files of other systems begin with a mark and end their lines with two characters; neither is the prompt's.
        prompt = data.decode() if typed else data.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeError as error:
        raise UsageError(f"{name} must be UTF-8 text") from error
    # Editors and echo append a newline.
    prompt = prompt if typed else prompt.removesuffix("\n")
    if not prompt:
        raise UsageError(f"{name} must not be empty")
    return prompt


def add_image_flag(parser: ArgumentParser, text: str) -> None:
    parser.add_argument("--image", metavar="FILE", action="append", default=[], help=text)


def read_image(path: str) -> bytes:
    """Return the bytes of an image's file. Raises WinnowError: the file cannot be read, or is no image."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the image {path}: {error.strerror}") from error
    decode_image(data, path)
    return data


def require_utf8(name: str, text: str) -> None:
    """Raise UsageError for text of bytes that were no UTF-8, which arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeError as error:
        raise UsageError(f"{name} must be UTF-8 text, got {text!r:.80}") from error


@contextmanager
def open_prompts(path: Path) -> Iterator[Path]:
    """Yield a file with the prompts of `path`: itself, or a copy of what a stream holds, which is gone at the end."""
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
