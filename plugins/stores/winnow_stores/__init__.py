"""Folders of prefixes behind URLs: an object store that fsspec reads, or Redis."""

import errno
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from threading import Thread
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from winnow.errors import ConfigError
from winnow.storage.folders import NAME, FileState

_RELIST_SECONDS = 5.0
"""Seconds after which an object store, which does not announce changes, is listed again."""
_ANSWER_SECONDS = 4.0
_BYTES_PER_SECOND = 32 * 2**20
"""A store must answer within these seconds, and the time that bytes take at this rate."""
_REDIS_KEY = "winnow:prefixes"
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
"""Names under which file systems of fsspec give the time of a file's last change."""

_Found = TypeVar("_Found")


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
    """Objects below a URL, such as s3://bucket/prefix. The store knows
    when an object was written and not when it was read: what this process used counts as used then."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        from fsspec.core import url_to_fs

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
            if NAME.fullmatch(name):
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


def open_remote(url: str) -> ObjectFolder | RedisFolder:
    """Return the folder at a URL. Raises ConfigError where it cannot be used."""
    return RedisFolder(url) if url.startswith(("redis://", "rediss://")) else ObjectFolder(url)


def _changed_at(entry: Mapping[str, Any]) -> int:
    """Return when an object was written, in nanoseconds; 0: the store does not say."""
    when = next((entry[name] for name in _TIMES if entry.get(name)), 0)
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    return int((when.timestamp() if isinstance(when, datetime) else when) * 10**9)
