"""Commands that pages show, and whether they could be typed: parsed up to the point where work begins."""

import argparse
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from winnow.cli import main as winnow

ROOT = Path(__file__).parent.parent
PROGRAMS = ("winnow", "python", "make", "pytest", "pip")
_FENCED = re.compile(r"^```(?:bash|text|sh)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")


class _Parsed(BaseException):
    """Arguments were accepted; what follows would be the work itself."""


def commands(page: Path) -> Iterator[str]:
    """Yield the command lines of a page: lines of code blocks, and code within a sentence."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = [match[1] for match in _FENCED.finditer(text)]
    text = _FENCED.sub("", text)
    indented = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    for line in (*indented, *(line for block in blocks for line in block.splitlines())):
        if is_command(line):
            yield line
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    yield from (" ".join(match[1].split()) for match in _INLINE.finditer(prose) if is_command(match[1]))


def is_command(line: str) -> bool:
    """Whether a line of code calls one of the programs."""
    return line.removeprefix(".venv/bin/").split(" ")[0] in PROGRAMS


def words(line: str) -> list[str]:
    """Split a line as a shell does, up to a comment or the next command."""
    found = shlex.split(line, comments=True)
    found[0] = found[0].removeprefix(".venv/bin/")
    return found[: min((found.index(each) for each in ("&&", "|", ";", ">") if each in found), default=None)]


def check(found: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Parse a command line without doing its work; return what is wrong with it, None for nothing."""
    program, *rest = found
    if program == "winnow":
        return _parse(lambda: winnow.main(rest), monkeypatch)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = [word for word in rest if "=" not in word and word not in targets]
        return f"no target {unknown[0]!r}" if unknown else None
    if program == "pytest":
        paths = [word.partition("::")[0] for word in rest if word.startswith("tests")]
        missing = [path for path in paths if not (ROOT / path).exists()]
        return f"no {missing[0]}" if missing else None
    if program == "pip" or not rest or rest[0].startswith("-c") or rest[:2] == ["-m", "pytest"]:
        return None
    monkeypatch.chdir(ROOT)
    if rest[0] == "-m":
        module = rest[1]
        if not module.startswith("winnow_lab"):
            return None
        place = ROOT.joinpath("lab", *module.split("."))
        script = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
        if not script.is_file():
            return f"no module {module}"
        if not _parses(script):
            return None
        monkeypatch.setattr(sys, "argv", [module, *rest[2:]])
        return _parse(lambda: runpy.run_module(module, run_name="__main__"), monkeypatch)
    if not (script := ROOT / rest[0]).is_file():
        return f"no file {rest[0]}"
    if not _parses(script):
        return None
    monkeypatch.setattr(sys, "argv", [str(script), *rest[1:]])
    monkeypatch.syspath_prepend(str(script.parent))
    return _parse(lambda: runpy.run_path(str(script), run_name="__main__"), monkeypatch)


def _parse(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Run a program with its work taken out; its exit code other than 0 is an error."""
    parse, load = argparse.ArgumentParser.parse_args, winnow.import_module

    def parse_only(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        parse(self, args, namespace)
        raise _Parsed

    def without_work(name: str) -> Any:
        return SimpleNamespace(configure=load(name).configure, execute=lambda _: 0)

    known = set(sys.modules)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        # Of modules that an earlier command has imported.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patch.setattr(winnow, "import_module", without_work)
        try:
            code = run()
        except _Parsed:
            code = 0
        except SystemExit as stop:
            code = stop.code
        finally:
            # Scripts beside each other import by bare names, which other scripts use for other files.
            for name in set(sys.modules) - known:
                if "." not in name and _is_script(getattr(sys.modules[name], "__file__", None)):
                    del sys.modules[name]
    return f"exit code {code}" if isinstance(code, (int, str)) and code else None


def _is_script(file: str | None) -> bool:
    return file is not None and Path(file).is_relative_to(ROOT / "lab")


def _parses(script: Path) -> bool:
    """Whether a script parses its arguments: one that does not would begin to work."""
    text = script.read_text(encoding="utf-8")
    return (
        re.search(r"Parser\(|arguments import|import main$|run_study|parse\(Options", text, re.MULTILINE)
        is not None
    )
