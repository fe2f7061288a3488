"""Where files of prefixes lie: a directory, or what a plug-in reads."""

import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from winnow.cache.accounting.prefix_chain import PrefixChain
from winnow.errors import ConfigError
from winnow.process.extras import require_plugin
from winnow.storage.prefix_format import SUFFIX, is_whole, read_header

NAME = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))
_UNFINISHED = re.compile(r"\." + NAME.pattern + r"\.\d+")

# A folder that has just changed may change again without a later time of change.
_CLOCK_TICK_NS = 50_000_000


class FileState(NamedTuple):
    """Size of a file in bytes, and when it was used last, in nanoseconds."""

    nbytes: int
    used_at: int


class Directory:
    """Folder on a local or shared file system: files by name, each complete or absent. Methods raise OSError. It
    `is_slow` where listing it may take longer than a step."""

    is_slow = False

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._guard = self._open_guard()
        except OSError as error:
            raise ConfigError(f"prefix_cache_dir: cannot use {path}: {error.strerror}") from None
        self._seen_at = 0

    def _open_guard(self) -> int:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self._path / ".lock", os.O_CREAT | os.O_RDWR, 0o600)

    def __str__(self) -> str:
        return str(self._path)

    def has_changed(self) -> bool:
        """Return whether files may have come or gone since the last call."""
        try:
            changed_at = self._path.stat().st_mtime_ns
        except OSError:  # it went away
            return True
        if changed_at == self._seen_at:
            return False
        settled = time.time_ns() - changed_at > _CLOCK_TICK_NS
        self._seen_at = changed_at if settled else 0
        return True

    def listing(self) -> dict[str, FileState]:
        found = dict[str, FileState]()
        for entry in os.scandir(self._path):
            if NAME.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    about = entry.stat()
                    found[entry.name] = FileState(about.st_size, about.st_mtime_ns)
        return found

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        return np.asarray(np.memmap(self._path / name, dtype=np.uint8, mode="r"))[start:stop]

    def write(self, name: str, content: bytes) -> None:
        write_whole(self._path / name, content, 0o600)

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def touch(self, names: Sequence[str]) -> None:
        """Mark files as used now, the first as last."""
        now = time.time_ns()
        for age, name in enumerate(names):
            with suppress(OSError):
                os.utime(self._path / name, ns=(now - age, now - age))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing; a process that ends gives the lock back."""
        if not os.fstat(self._guard).st_nlink:  # somebody deleted the directory
            lost, self._guard = self._guard, self._open_guard()
            os.close(lost)
        fcntl.flock(self._guard, fcntl.LOCK_EX)
        try:
            for entry in os.scandir(self._path):
                if _UNFINISHED.fullmatch(entry.name):  # the lock is held, so its writer has ended
                    Path(entry.path).unlink(missing_ok=True)
            yield
        finally:
            fcntl.flock(self._guard, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._guard)


class SavedDirectory(Directory):
    """Directory of files that a user saved: none is deleted for room, and none is marked as used."""

    def __init__(self, path: Path, name: str = "prefix_store") -> None:
        if not path.is_dir():
            raise ConfigError(f"{name} must be a directory of what was saved, got {str(path)!r}")
        self._path, self._seen_at = path, 0

    def unsaved(self, prompts: Sequence[list[int]], tenant: str, block_size: int) -> list[list[int]]:
        """Return the prompts that no file holds as a document of the tenant."""
        held = {read_header(partial(self.read, name)).get("document") for name in self.listing()}
        found = []
        for token_ids in prompts:
            chain = PrefixChain(tenant, block_size)
            chain.extend(token_ids)
            if chain.document_key(token_ids).hex() not in held:
                found.append(token_ids)
        return found

    def delete_damaged(self) -> list[str]:
        """Delete the files that do not hold what was saved, and return their names."""
        damaged = [name for name in self.listing() if not is_whole(partial(self.read, name))]
        for name in damaged:
            self.delete(name)
        return damaged

    def write(self, name: str, content: bytes) -> None:
        write_whole(self._path / name, content)

    def touch(self, names: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass


class PrefixFolder(Protocol):
    """Where files of prefixes lie: what `Directory` does."""

    is_slow: bool

    def has_changed(self) -> bool: ...

    def listing(self) -> dict[str, FileState]: ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]: ...

    def write(self, name: str, content: bytes) -> None: ...

    def delete(self, name: str) -> None: ...

    def touch(self, names: Sequence[str]) -> None: ...

    def locked(self) -> AbstractContextManager[None]: ...

    def close(self) -> None: ...


def open_folder(place: str | Path) -> PrefixFolder:
    """Return the folder at a path, or at a URL that winnow-stores reads. Raises ConfigError where it cannot be used."""
    scheme, colon, rest = str(place).partition("://")
    if not colon or scheme == "file":
        return Directory(Path(rest if colon else place))
    folder: PrefixFolder = require_plugin("stores", f"prefix_cache_dir: a {scheme} URL")(str(place))
    return folder


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically, also across a loss of power."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(unfinished, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
