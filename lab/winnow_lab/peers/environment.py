"""Peers: other software that Winnow is held beside, each in a virtual environment of its own.

The torch in it is the one that Winnow runs on, and no CUDA libraries are fetched.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from winnow.errors import WinnowError

INSTALL_SECONDS = 3600
CONVERT_SECONDS = 1800
# Lines of an error that a table and a report still can hold.
TOLD_LINES = 12
# What CUDA builds of torch pull in.
CUDA_PACKAGES = ("nvidia-", "cuda-")
# Asks a driver about its GPUs, in Python alone: monitors bring it.
_NO_CUDA_BUILD = ("nvidia-ml-py",)


class PeerError(WinnowError):
    """A peer could not be installed, failed, or did other work than it was given."""


@dataclass(frozen=True)
class Environment:
    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def prepare(
        self, packages: Sequence[str], unwanted: Sequence[str] = (), sources: Sequence[str] = ()
    ) -> None:
        """Make it, install `packages` and take out what is `unwanted`, unless that has been done.

        torch comes first and stays as it is.

        Args:
            sources: names among what is needed that are published as source alone; all others must come built.
        """
        mark = self.path / "installed.json"
        torch = f"torch=={version('torch').partition('+')[0]}"
        wanted = [torch, *packages, *unwanted]
        if mark.is_file() and json.loads(mark.read_text()) == wanted:
            return
        call([sys.executable, "-m", "venv", "--clear", self.path], "making an environment", INSTALL_SECONDS)
        constraints = self.path / "constraints.txt"
        constraints.write_text(torch + "\n")
        self._install([torch])
        by_name = [word for name in sources for word in ("--no-binary", name)]
        self._install([*by_name, "--constraint", constraints, *packages])
        if unwanted:
            call(
                [self.python, "-m", "pip", "uninstall", "--yes", *unwanted], "pip uninstall", INSTALL_SECONDS
            )
        mark.write_text(json.dumps(wanted))

    def _install(self, arguments: Sequence[str | Path]) -> None:
        # A build from source would take the machine for an hour and measure the compiler's defaults.
        pip: list[str | Path] = [
            self.python,
            *("-m", "pip", "install", "--only-binary", ":all:", "--no-input"),
        ]
        report = self.path / "would-install.json"
        asking: list[str | Path] = ["--dry-run", "--quiet", "--report", report]
        call([*pip, *asking, *arguments], "asking pip", INSTALL_SECONDS)
        named = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
        cuda = [
            name
            for name in named
            if name.lower().startswith(CUDA_PACKAGES) and name.lower() not in _NO_CUDA_BUILD
        ]
        if cuda:
            raise PeerError(f"pip would fetch a CUDA build ({', '.join(sorted(cuda)[:3])}, ...)")
        call([*pip, *arguments], "pip install", INSTALL_SECONDS)


def call(
    command: Sequence[str | Path],
    what: str,
    seconds: float,
    cwd: Path | None = None,
    variables: dict[str, str] | None = None,
) -> str:
    """Run a command to its end, return its output. PeerError, also after `seconds`, holds the end of what it said."""
    # A process group of its own, so that what it started ends with it.
    with subprocess.Popen(  # noqa: S603
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=cwd,
        env=os.environ | (variables or {}),
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except BaseException as error:  # also Ctrl-C
            os.killpg(process.pid, 9)
            if isinstance(error, subprocess.TimeoutExpired):
                raise PeerError(f"{what} took longer than {seconds:g} s") from None
            raise
    if process.returncode:
        lines = [line for line in (errors or out).splitlines() if line.strip()]
        raise PeerError(
            f"{what} ended with exit code {process.returncode}: " + "\n".join(lines[-TOLD_LINES:])
        )
    return out
