"""`winnow` in a process forked from this one: it imports nothing again, and can be killed."""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkProcess

from winnow.cli.main import main

CLOSED = -1
_FORK = multiprocessing.get_context("fork")


def start(
    words: Sequence[str], env: Mapping[str, str], out: int | None = None, err: int | None = None
) -> ForkProcess:
    """Start `winnow WORDS`. out, err: descriptors that it prints to, or `CLOSED`; None: they are discarded."""
    process = _FORK.Process(target=_run, args=(words, env, out, err), daemon=True)
    process.start()
    return process


def _run(words: Sequence[str], env: Mapping[str, str], out: int | None, err: int | None) -> None:
    """Do what `python -m winnow WORDS` does, to its last step at exit."""
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["winnow", *words]
    for number, name, given in ((1, "stdout", out), (2, "stderr", err)):
        if given == CLOSED:
            os.close(number)
            setattr(sys, name, None)
            continue
        os.dup2(os.open(os.devnull, os.O_WRONLY) if given is None else given, number)
        setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 (open to the end)
    main()
    atexit._run_exitfuncs()  # the command's own comes before those of this process, and leaves
