"""A server in a process of its own on the loopback address; imports nothing but the standard library."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

STOP_SECONDS = 20


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def serving(
    command: Sequence[str | Path], port: int, path: str, seconds: float, *, own_group: bool = True
) -> Iterator[str]:
    """Run the server while the block runs; yields its address once GET `path` is answered with 200.

    Args:
        own_group: of processes, so that what it started ends with it; False: what kills this process's group, as
            run.py does after too long, ends it too.

    Raises:
        RuntimeError: it ended, or is not ready after that many seconds; holds the end of what it printed.
    """
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=log, stderr=subprocess.STDOUT, start_new_session=own_group
        )
        try:
            wait_until_ready(address + path, process, seconds)
            yield address
        except BaseException as error:
            log.seek(0)
            said = log.read()[-2000:]
            if isinstance(error, RuntimeError):
                raise RuntimeError(f"{error}\n{said}") from None
            sys.stderr.write(said)
            raise
        finally:
            _end(process)


def wait_until_ready(address: str, process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Return when the address is answered with 200; raise RuntimeError where it is not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(address):  # noqa: S310
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server is not ready; exit code {process.poll()}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):  # it leads no group, or all of it has ended
        os.killpg(process.pid, 9)
    process.kill()
    process.wait()
