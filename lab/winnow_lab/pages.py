"""Report which results of docs/results, pages and their parts, can be repeated at this commit.

    python -m winnow_lab.pages check

names those whose command cannot be typed any more, or asks for a policy or a format that is gone, and whose commit
this repository does not have; then, as notes, those without numbers beside them and those whose study has changed
since. It needs a checkout with tests/documented.py, which parses commands. The exit code is 1 for all but notes.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from winnow.config import EngineConfig
from winnow.errors import WinnowError
from winnow.eviction import PRESETS
from winnow.values.value_tier import ValueTier
from winnow_lab.checkout import ROOT
from winnow_lab.evaluate.variants import VARIANTS
from winnow_lab.real.codec_tables import Codec, read_codecs
from winnow_lab.study.parts import read_parts

RESULTS = ROOT / "docs/results"
_COMMIT = r"\b[0-9a-f]{7,8}(?:-dirty)?\b"
_COMMITS = re.compile(rf"\b[Cc]ommits? (`?{_COMMIT}(?:, {_COMMIT})*)|\"commit\": \"({_COMMIT})")
_POLICIES = {*PRESETS, *VARIANTS, "full", "int8", "auto"}


class Part(NamedTuple):
    """A study's part of a page, and the text of the JSON beside it; either may be empty."""

    name: str
    text: str
    numbers: str = ""


def parts_of(results: Path = RESULTS) -> Iterator[Part]:
    """Yield every part of every page of a folder, then numbers without a page."""
    numbers = {each.stem: each.read_text(encoding="utf-8") for each in sorted(results.glob("*.json"))}
    for page in sorted(each for each in results.glob("*.md") if each.stem != "README"):
        yield from (Part(name, text, numbers.pop(name, "")) for name, text in read_parts(page).items())
    yield from (Part(name, "", text) for name, text in numbers.items())


def commands_of(part: Part) -> Iterator[list[str]]:
    """Yield the commands of a part and of the numbers beside it: lines, code within a sentence, and fields."""
    tests = _test_helpers()
    for found in re.finditer(r"^    (\S.*)$|`([^`\n]+)`", part.text, re.MULTILINE):
        line = found[1] or found[2]
        if (tests.is_command(line) and " " in line) or line.split(" ")[0].endswith(".py"):
            yield tests.words(line)
    fields: list[dict[str, Any]] = []
    json.loads(part.numbers or "{}", object_hook=fields.append)
    yield from (each["command"] for each in fields if isinstance(each.get("command"), list))


def problems(part: Part) -> Iterator[str]:
    """Yield why a part cannot be repeated."""
    found = list(commands_of(part))
    if not found:
        yield "names no command"
    for words in found:
        if not _can_be_typed(words):
            yield f"no such command: {' '.join(words)[:80]}"
        yield from refused_values(words)
    if "no claim rests on this part" not in part.text:
        missing = (each for each in commits_of(part) if _git("cat-file", "-e", f"{each}^{{commit}}"))
        yield from (f"commit {each} is not here" for each in missing)
    if not commits_of(part):
        yield "names no commit"


def refused_values(words: Sequence[str]) -> Iterator[str]:
    """Yield values that a command's parser passes and its work refuses: policies, formats, words of a tier."""
    for flag, value in pairwise(part for word in words for part in word.split("=", word.startswith("--"))):
        try:
            if flag in ("--policies", "--eviction", "--methods", "--presets"):
                names = {each.partition(":")[0] for each in value.split(",") if ".py:" not in each}
                yield from (f"no policy {name!r}" for name in sorted(names - _POLICIES))
            elif flag == "--codecs":
                for name in read_codecs(value):
                    EngineConfig.from_options(Codec(name).options)
            elif flag == "--extras":
                for extra in filter(None, value.split(",")):
                    ValueTier.parse(f"host:L=1,N=32,{extra}", "--extras")
        except WinnowError as error:
            yield str(error)


def commits_of(part: Part) -> list[str]:
    named = [
        commit
        for found in _COMMITS.finditer(part.text + part.numbers)
        for commit in re.findall(_COMMIT, found[0])
    ]
    return sorted({commit.removesuffix("-dirty") for commit in named})


def notes(part: Part) -> Iterator[str]:
    """Yield why a part might be measured again."""
    if not part.numbers and ".json)" not in part.text:  # a link to the file that has them
        yield "keeps no numbers beside it"
    words = {word for command in commands_of(part) for word in command}
    places = [ROOT.joinpath("lab", *word.split(".")) for word in words if word.startswith("winnow_lab.")]
    paths = [str(each) for place in places for each in (place, place.with_suffix(".py")) if each.exists()]
    if paths and any(_git("diff", "--quiet", commit, "HEAD", "--", *paths) for commit in commits_of(part)):
        yield "its study has changed since"


def _can_be_typed(words: Sequence[str]) -> bool:
    import pytest

    tried = [[Path(words[0]).name, *words[1:]]]
    if words[0].endswith(".py"):  # scripts are recorded by name, and several have it
        scripts = (ROOT / "lab/winnow_lab").rglob(Path(words[0]).name)
        tried = [["python", str(each.relative_to(ROOT)), *words[1:]] for each in scripts]
    nothing = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(nothing),
        contextlib.redirect_stdout(nothing),
    ):
        return any(_test_helpers().check(each, patch) is None for each in tried)


def _git(*words: str) -> int:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False).returncode  # noqa: S603, S607


def _test_helpers() -> Any:
    sys.path[:0] = [] if str(ROOT / "tests") in sys.path else [str(ROOT / "tests")]
    return import_module("documented")


def main() -> int:
    if sys.argv[1:] != ["check"]:
        print(__doc__)
        return 2
    parts = list(parts_of())
    broken, noted = (
        {part.name: [*why(part)] for part in parts if any(why(part))} for why in (problems, notes)
    )
    for label, pairs in (("cannot be repeated", broken), ("note", noted)):
        for name, found in pairs.items():
            print(f"{label}: {name}: {'; '.join(dict.fromkeys(found))}")
    print(f"{len(parts)} results, {len(broken)} that cannot be repeated, {len(noted)} with notes")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
