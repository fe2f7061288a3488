"""Where files of prefixes lie: a directory, an object store that fsspec reads, or Redis."""

import errno
import fcntl
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from winnow.errors import ConfigError
from winnow.extras import install_hint
from winnow.storage.prefix_format import SUFFIX

_NAME = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))
_UNFINISHED = re.compile(r"\." + _NAME.pattern + r"\.\d+")

# A folder that has just changed may change again without a later time of change.
_CLOCK_TICK_NS = 50_000_000
_RELIST_SECONDS = 5.0
"""Seconds after which an object store, which does not announce changes, is listed again."""
_ANSWER_SECONDS = 4.0
_BYTES_PER_SECOND = 32 * 2**20
"""A store must answer within these seconds, and the time that bytes take at this rate."""
_REDIS_KEY = "winnow:prefixes"
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
"""Names under which file systems of fsspec give the time of a file's last change."""

_Found = TypeVar("_Found")


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
            if _NAME.fullmatch(entry.name):
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

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(f"prefix_store must be a directory, got {str(path)!r}")
        self._path, self._seen_at = path, 0

    def write(self, name: str, content: bytes) -> None:
        write_whole(self._path / name, content)

    def touch(self, names: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass


class _Remote(ABC):
    """Folder behind a URL, which announces no changes and has no locks: files appear whole.

    Stores may stall, and not every client has a timeout: each call runs on a thread of its own. One without an answer
    after `_ANSWER_SECONDS`, and the time that its bytes take, raises OSError.
    """

    is_slow = True

    def __init__(self, url: str) -> None:
        self._url = re.sub("//[^/]*@", "//", url)  # without a password
        self._next_listing = 0.0
        self._sizes: dict[str, int] = {}
        self._closed: Future[None] = Future()

    def __str__(self) -> str:
        return self._url

    def has_changed(self) -> bool:
        now = time.monotonic()
        if now < self._next_listing:
            return False
        self._next_listing = now + _RELIST_SECONDS
        return True

    def listing(self) -> dict[str, FileState]:
        found = self._ask(self._list)
        self._sizes = {name: state.nbytes for name, state in found.items()}
        return found

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        end = self._sizes.get(name, 0) if stop is None else stop
        return np.frombuffer(self._ask(lambda: self._read(name, start, stop), end - start), dtype=np.uint8)

    def write(self, name: str, content: bytes) -> None:
        self._ask(lambda: self._write(name, content), len(content))

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(lambda: self._delete(name))

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)  # every wait for an answer ends

    def _ask(self, call: Callable[[], _Found], nbytes: int = 0) -> _Found:
        """Return what a call of the store's client gives; what it raises is an OSError with a text."""
        answer: Future[_Found] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        seconds = _ANSWER_SECONDS + max(nbytes, 0) / _BYTES_PER_SECOND
        Thread(target=run, name="prefix-store", daemon=True).start()
        either: list[Future[Any]] = [answer, self._closed]
        if answer not in wait(either, seconds, FIRST_COMPLETED).done:
            raise OSError(errno.ETIMEDOUT, f"no answer within {seconds:.0f} seconds")
        try:
            return answer.result()
        except FileNotFoundError:
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error

    @abstractmethod
    def _list(self) -> dict[str, FileState]: ...

    @abstractmethod
    def _read(self, name: str, start: int, stop: int | None) -> bytes: ...

    @abstractmethod
    def _write(self, name: str, content: bytes) -> None: ...

    @abstractmethod
    def _delete(self, name: str) -> None: ...


class ObjectFolder(_Remote):
    """Objects below a URL, such as s3://bucket/prefix. Raises ConfigError where a package is missing. The store knows
    when an object was written and not when it was read: what this process used counts as used then."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ConfigError(
                f"prefix_cache_dir: {self} needs the package fsspec: {install_hint('object-store')}"
            ) from None
        try:
            self._store, self._root = self._ask(lambda: url_to_fs(url))
        except OSError as error:  # packages of schemes raise their own
            raise ConfigError(f"prefix_cache_dir: cannot use {self}: {error.strerror}") from error
        self._used: dict[str, int] = {}

    def touch(self, names: Sequence[str]) -> None:
        now = time.time_ns()
        self._used |= {name: now - age for age, name in enumerate(names)}

    def _list(self) -> dict[str, FileState]:
        found = {}
        self._store.invalidate_cache(self._root)
        try:
            entries = self._store.ls(self._root, detail=True)
        except FileNotFoundError:  # there is no object yet
            entries = []
        for entry in entries:
            name = entry["name"].rpartition("/")[2]
            if _NAME.fullmatch(name):
                used_at = max(_changed_at(entry), self._used.get(name, 0))
                found[name] = FileState(int(entry["size"]), used_at)
        return found

    def _read(self, name: str, start: int, stop: int | None) -> bytes:
        content: bytes = self._store.cat_file(self._path(name), start=start or None, end=stop)
        return content

    def _write(self, name: str, content: bytes) -> None:
        self._store.pipe_file(self._path(name), content)

    def _delete(self, name: str) -> None:
        self._store.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class RedisFolder(_Remote):
    """Values of a Redis or Valkey server, such as redis://host:6379/0, with a sorted set of when they were used. Raises
    ConfigError where the package is missing, or the URL is none."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            import redis
        except ImportError:
            raise ConfigError(
                f"prefix_cache_dir: {self} needs the package redis: pip install redis"
            ) from None
        try:
            # So that the threads of calls that are given up end too.
            self._client = redis.Redis.from_url(
                url, socket_timeout=30, socket_connect_timeout=_ANSWER_SECONDS
            )
        except ValueError as error:
            raise ConfigError(f"prefix_cache_dir: cannot use {self}: {error}") from error

    def touch(self, names: Sequence[str]) -> None:
        now = time.time()
        used = {name: now - age * 1e-6 for age, name in enumerate(names)}
        if used:
            with suppress(OSError):
                self._ask(lambda: self._client.zadd(_REDIS_KEY, used, xx=True))

    def _list(self) -> dict[str, FileState]:
        used = self._client.zrange(_REDIS_KEY, 0, -1, withscores=True)
        pipe = self._client.pipeline(transaction=False)
        for key, _ in used:
            pipe.strlen(_REDIS_KEY + ":" + key.decode())
        states = zip(used, pipe.execute(), strict=True)
        return {key.decode(): FileState(size, int(when * 10**9)) for (key, when), size in states if size}

    def _read(self, name: str, start: int, stop: int | None) -> bytes:
        content: bytes = self._client.getrange(
            f"{_REDIS_KEY}:{name}", start, -1 if stop is None else stop - 1
        )
        return content

    def _write(self, name: str, content: bytes) -> None:
        pipe = self._client.pipeline()
        pipe.set(f"{_REDIS_KEY}:{name}", content).zadd(_REDIS_KEY, {name: time.time()}).execute()

    def _delete(self, name: str) -> None:
        self._client.pipeline().delete(f"{_REDIS_KEY}:{name}").zrem(_REDIS_KEY, name).execute()


PrefixFolder = Directory | ObjectFolder | RedisFolder


def open_folder(place: str | Path) -> PrefixFolder:
    """Return the folder at a path or a URL. Raises ConfigError where it cannot be used."""
    scheme, colon, rest = str(place).partition("://")
    if not colon or scheme == "file":
        return Directory(Path(rest if colon else place))
    return RedisFolder(str(place)) if scheme in ("redis", "rediss") else ObjectFolder(str(place))


def _changed_at(entry: Mapping[str, Any]) -> int:
    """Return when an object was written, in nanoseconds; 0: the store does not say."""
    when = next((entry[name] for name in _TIMES if entry.get(name)), 0)
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    return int((when.timestamp() if isinstance(when, datetime) else when) * 10**9)


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
