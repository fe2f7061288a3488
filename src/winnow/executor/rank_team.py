"""Processes of the ranks beside this one: they are sent what they are to do, and all ranks do it together."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from winnow.cache import HostTierError
from winnow.errors import RankLostError, WinnowError, describe_error

T = TypeVar("T")

_ANSWER_SECONDS = 5.0
"""For other ranks to end what this one could not: where it failed alone they wait for it within an exchange."""
_END_SECONDS = 5.0
_ENVIRONMENT = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Silence of the others: rank 0 says what is to be said of loading a model."""


class RankTeam:
    """The ranks 1, 2, ... in processes of their own. This process, rank 0, leads them. A rank that fails or ends breaks
    the team: all its processes are ended, and every call says why.

    Attributes:
        directory: for files by which the ranks meet; only this user reads it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._directory = tempfile.TemporaryDirectory(prefix="winnow-ranks-")
        self.directory = Path(self._directory.name)
        self._broken: str | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        for rank in range(1, size):
            self._start(rank)
        self.call(lambda: None, "start")  # one that cannot even start would be waited for where ranks meet

    def _start(self, rank: int) -> None:
        here, there = socket.socketpair()
        with there:
            # Not multiprocessing's own start: it would run the caller's main module again.
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "winnow.executor.rank_process", str(rank), str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is this process's to handle
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._processes.append(process)
        self._connections.append(Connection(here.detach()))

    def call(self, own: Callable[[], T], name: str, *arguments: Any) -> T:
        """Run the method of this name on every other rank, and `own` on this one at the same time.

        Raises:
            RankLostError: a rank has ended or failed, now or before.
            Exception: what `own` raised, or else another rank.
        """
        return self.gather(own, name, *arguments)[0]

    def gather(self, own: Callable[[], T], name: str, *arguments: Any) -> list[T]:
        """Do as `call` does, and return the results of all ranks."""
        if self._broken is not None:
            raise RankLostError(self._broken)
        failed: Exception | None = None
        found: dict[int, Any] = {}
        try:
            for connection in self._connections:
                connection.send((name, arguments))
            found[0] = own()
        except Exception as error:
            failed = error
        except BaseException:  # an impatient Ctrl-C: the others may wait within an exchange
            self._break("rank 0 was interrupted")
            raise
        waiting = {connection: rank for rank, connection in enumerate(self._connections, 1)}
        while waiting:
            answered = wait(list(waiting), None if failed is None else _ANSWER_SECONDS)
            if not answered:
                break
            for connection in [each for each in waiting if each in answered]:
                rank = waiting.pop(connection)
                found[rank] = self._receive(rank, failed)
        failed = failed or next((each for each in found.values() if isinstance(each, Exception)), None)
        if failed is not None:
            if waiting or not isinstance(failed, WinnowError | HostTierError):
                self._break(f"rank 0 failed: {describe_error(failed)}")
            raise failed
        return [found[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes. Does nothing the second time."""
        self._break("the ranks were closed")

    def _receive(self, rank: int, failed: Exception | None) -> Any:
        try:
            is_sound, result = self._connections[rank - 1].recv()
        except (EOFError, OSError):
            raise self._lost(rank, f"ended with {self._exit_of(rank)}") from failed
        if not is_sound:
            raise self._lost(rank, f"failed: {result}") from failed
        return result

    def _lost(self, rank: int, how: str) -> RankLostError:
        self._break(f"rank {rank} of {self.size} {how}; all ranks were ended: start again")
        return RankLostError(self._broken or "")

    def _exit_of(self, rank: int) -> str:
        try:
            code = self._processes[rank - 1].wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "no exit"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _break(self, why: str) -> None:
        if self._broken is not None:
            return
        self._broken = why
        for connection in self._connections:
            connection.close()  # which ends a rank that waits for a call
        for process in self._processes:
            try:
                process.wait(_END_SECONDS / 10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._directory.cleanup()
