"""A source tree that was never installed has no metadata and no extension: every command still helps, some work."""

import subprocess
import sys

import pytest

from winnow.cli.main import COMMANDS

HIDDEN = """
import contextlib, importlib.metadata as metadata, io, sys
sys.modules["winnow._native"] = None
version = metadata.version
def hidden(name):
    if name.startswith("winnow"):
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = hidden
from winnow.cli.main import main
for command in sys.argv[1:]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            code = main(command.split())
        except SystemExit as stop:
            code = stop.code
    assert code == 0 and out.getvalue().strip(), command
"""


@pytest.mark.cpu
def test_commands_run_without_metadata() -> None:
    commands = [f"{name} --help" for name in COMMANDS] + ["policies", "--version"]
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, *commands], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
