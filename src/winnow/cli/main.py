"""The entry point: picks the command, and turns what goes wrong into one line and an exit code.

Exit codes: 0 all fine; 1 some requests of a run failed; 2 the command or every request was unusable; 130 interrupted.
"""

import argparse
import atexit
import errno
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from winnow.cli.flags.llama_cpp_flags import llama_cpp_hint
from winnow.cli.flags.options import merge_model, rare_flags
from winnow.cli.screen.terminal import named_standard_output, occupy_standard_streams, silence
from winnow.errors import UsageError, WinnowError, known_names, nearest_name
from winnow.process.extras import GET_THE_LAB, install_plugin
from winnow.version import __version__

if TYPE_CHECKING:
    from winnow.eviction import EvictionPolicy


DESCRIPTION = "Winnow runs large language models on little memory."

EPILOG = """\
examples:
  winnow generate "The capital of France is"
  winnow run prompts.jsonl -o answers.jsonl --kv-memory 512MiB
  winnow run --help
"""

COMMANDS = {
    "run": "answer a file of prompts, resumable at any moment",
    "merge": "join the outputs of runs that shared a file of prompts",
    "generate": "stream the answer to one prompt",
    "chat": "talk to a model in the terminal",
    "serve": "serve the OpenAI API over HTTP",
    "pull": "fetch a model by its name",
    "list": "list the models that are here",
    "cache": "list or clear the models that are kept for their next start",
    "pack": "keep a model as this processor reads it, to start in a second and with less memory",
    "check": "load a model and compare it with its own code",
    "doctor": "print what a report of a fault needs",
    "prefix": "save a compressed document, so that prompts that begin with it start from there",
    "documents": "compute a folder of texts ahead, which prompts then show in any order",
    "policies": "list the eviction policies, or show one in full",
}
OF_THE_LAB = frozenset(("eval", "bench", "plan", "tune", "simulate"))
JOINED = dict.fromkeys(OF_THE_LAB, ("winnow-lab", GET_THE_LAB)) | {
    "inspect": ("winnow-inspect", install_plugin("inspect"))
}
"""Commands that join these by the entry points `winnow.commands`: the distribution that has them, and how to get it."""


# What a disk, a mount or a limit refuses, wherever it comes up; any other OSError is a fault of ours to be seen whole.
_OF_THE_MACHINE = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EBADF, errno.ENOMEM),
        *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG),
    )
)


class Parser(argparse.ArgumentParser):
    """A parser that raises what is wrong instead of printing the usage, and knows the nearest flag.

    `--help` shows the flags that matter most in a line each, `--help all` every one in full: those of `rare_flags` too.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault(
            "formatter_class", partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
        )
        options.setdefault("allow_abbrev", False)
        super().__init__(**{**options, "add_help": False})
        self.add_argument(
            "-h", "--help", action=_Help, nargs="?", metavar="all", help="show this; all: every flag"
        )

    def format_brief_help(self) -> str:
        """Return the help without rare flags, with a line that says how many there are."""
        hidden = [action for action in rare_flags(self) if action.help != argparse.SUPPRESS]
        brief = [action for action in self._actions if "brief" in vars(action)]
        before, epilog = [(action, dict(vars(action))) for action in (*hidden, *brief)], self.epilog
        for action in hidden:
            action.help = argparse.SUPPRESS
        for action in brief:
            action.help, action.option_strings = vars(action)["brief"], action.option_strings[:1]
            action.metavar = "NAME" if action.choices else action.metavar
        if hidden:
            self.epilog = f"`{self.prog} --help all` lists {len(hidden)} more flags.\n\n{epilog or ''}"
        try:
            return self.format_help()
        finally:
            self.epilog = epilog
            for action, values in before:
                vars(action).update(values)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, which calls this for every command; a model by position becomes `--model`."""
        found, unknown = super().parse_known_args(args, namespace)
        merge_model(found)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = known_names(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {names}")

    def nearest_flag(self, text: str) -> str | None:
        shown = [flag for flag, each in self._option_string_actions.items() if each.help != argparse.SUPPRESS]
        return nearest_name(text.partition("=")[0], shown)


class _Help(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(parser.format_help() if values == "all" else parser.format_brief_help(), end="")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name; None: this process's) and return its exit code."""
    if argv is not None:
        return exit_code(lambda: _dispatch(argv))
    # Nothing here computes with numpy's threads, which spin for 0.1 s once they are started; for 2^16 cycles at most.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")
    warnings.showwarning = _show_warning
    # What is registered first is called last, when everything else has ended.
    codes: list[int] = []
    atexit.register(_leave, codes)
    codes.append(exit_code(lambda: _dispatch(sys.argv[1:])))
    return codes[0]


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print("winnow: warning:", " ".join(str(message).split()), file=sys.stderr)


def _leave(codes: Sequence[int]) -> None:
    """End the process with its exit code, where it has one: an interpreter takes 0.4 s to take torch apart."""
    if codes:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(codes[0])


def exit_code(run: Callable[[], int]) -> int:
    """Return what `run` returns; report a user error in one line on standard error and return its code."""
    occupy_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # What an encoding does not have, as an answer may hold, ends no command: `?` stands for it.
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    try:
        with named_standard_output():
            code = run()
            if sys.stdout is not None:
                sys.stdout.flush()  # at exit it would be too late for an error of ours
        return code
    except WinnowError as error:
        return _refuse(str(error))
    except KeyboardInterrupt as interrupt:
        print("winnow: interrupted", *interrupt.args, file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left, as in `winnow generate ... | head`.
        silence(sys.stdout)
        return 1
    except MemoryError as error:
        return _refuse(f"this machine's memory does not suffice{f': {error}' if str(error) else ''}")
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE:
            raise
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror))


def _refuse(message: str) -> int:
    # One line, whatever the message quotes: scripts read it.
    print("winnow: error:", " ".join(message.split()), file=sys.stderr)
    return 2


def _dispatch(argv: Sequence[str]) -> int:
    parser = Parser(prog="winnow", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"winnow {__version__}")
    groups = [(COMMANDS, "winnow.cli.{}")]
    # Looking for entry points reads a file of each installed distribution.
    if not argv or argv[0] not in COMMANDS:
        joined = [point.load() for point in entry_points(group="winnow.commands")]
        if argv and argv[0] in JOINED and not any(argv[0] in each.COMMANDS for each in joined):
            name, command = JOINED[argv[0]]
            raise UsageError(f"`winnow {argv[0]}` is part of {name}, which is not installed: {command}")
        groups += [(each.COMMANDS, each.MODULES) for each in joined]
    return run_command(parser, groups, argv)


def run_command(parser: Parser, groups: Iterable[tuple[Mapping[str, str], str]], argv: Sequence[str]) -> int:
    """Run one command, and return its exit code. Raises UsageError: the arguments are unusable.

    Args:
        parser: of the whole program.
        groups: what each command does, by name; and the name of a command's module, with {} for the command's name.
            Only the module of the command that runs is imported: each brings libraries that take their time.
    """
    choices = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    chosen = parser
    for commands, modules in groups:
        for name, summary in commands.items():
            subparser = choices.add_parser(name, help=summary)
            if name in argv[:1]:
                chosen = subparser
                command = import_module(modules.format(name.replace("-", "_")))
                command.configure(chosen)
                chosen.set_defaults(execute=command.execute)
    alone = not argv or (len(argv) == 1 and chosen is not parser)
    if alone and any(each.required for each in chosen._actions):
        print(chosen.format_brief_help())  # a command typed alone lists what there is
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        # A command with commands of its own says whose flags were meant.
        chosen = getattr(namespace, "parser", chosen)
        nearest = chosen.nearest_flag(unknown[0])
        hint = llama_cpp_hint(unknown[0]) or (f"; did you mean {nearest}?" if nearest else "")
        chosen.error(f"unknown argument {unknown[0]!r}{hint}")
    if sys.stdout is None and namespace.command != "run":
        raise UsageError("cannot write to standard output: it is closed")
    register_own_policies(namespace)
    code: int = namespace.execute(namespace)
    return code


def register_own_policies(namespace: argparse.Namespace) -> None:
    """Make each `path.py:name` and `package.module:name` among the policies that were typed a preset of that name, for
    this process. Only what is typed is run; a request that names such a place finds what was typed, or nothing.
    """
    typed = (getattr(namespace, name, None) for name in ("eviction", "presets"))
    texts = [
        text for value in typed for text in (value.split(",") if isinstance(value, str) else value or ())
    ]
    for text in filter(None, texts):
        place, found, name = text.strip().rpartition(":")
        if found:
            from winnow.eviction import PRESETS, Preset

            PRESETS[text.strip()] = Preset(_load(place, name), f"`{name}` of {place}")


def _load(place: str, name: str) -> "EvictionPolicy":
    from winnow.eviction import EvictionPolicy
    from winnow.eviction.resolve import as_policy

    given = f"--eviction {place}:{name}"
    try:
        module = _module(Path(place)) if place.endswith(".py") else import_module(place)
        policy = as_policy(getattr(module, name, None))
    except FileNotFoundError:
        raise UsageError(f"{given}: there is no such file") from None
    except Exception as error:  # also of a class whose fields have no values
        raise UsageError(f"{given}: the file does not run: {error}") from error
    if not isinstance(policy, EvictionPolicy):
        raise UsageError(f"{given} must be an EvictionPolicy or a score, got {policy!r:.80}")
    return policy


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
