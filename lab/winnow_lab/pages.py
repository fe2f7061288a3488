"""Report which pages of docs/results can be repeated at this commit.

    python -m winnow_lab.pages check

names the pages whose command cannot be typed any more, or asks for a policy or a format that is gone, and whose commit
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
from typing import Any

from winnow.config import EngineConfig
from winnow.errors import WinnowError
from winnow.eviction import PRESETS
from winnow.values.value_tier import ValueTier
from winnow_lab.checkout import ROOT
from winnow_lab.evaluate.variants import VARIANTS
from winnow_lab.real.codec_tables import Codec, read_codecs

RESULTS = ROOT / "docs/results"
_COMMIT = r"\b[0-9a-f]{7,8}(?:-dirty)?\b"
_COMMITS = re.compile(rf"\b[Cc]ommits? (`?{_COMMIT}(?:, {_COMMIT})*)|\"commit\": \"({_COMMIT})")
_POLICIES = {*PRESETS, *VARIANTS, "full", "int8", "auto"}


def commands_of(page: Path) -> Iterator[list[str]]:
    """Yield the commands of a page and of the numbers beside it: lines, code within a sentence, and fields."""
    tests, numbers = _test_helpers(), page.with_suffix(".json")
    if page.suffix == ".md":
        for found in re.finditer(r"^    (\S.*)$|`([^`\n]+)`", page.read_text(encoding="utf-8"), re.MULTILINE):
            line = found[1] or found[2]
            if (tests.is_command(line) and " " in line) or line.split(" ")[0].endswith(".py"):
                yield tests.words(line)
    if numbers.exists():
        yield from _recorded(json.loads(numbers.read_text(encoding="utf-8")))


def problems(page: Path) -> Iterator[str]:
    """Yield why a page cannot be repeated."""
    found = list(commands_of(page))
    if not found:
        yield "names no command"
    for words in found:
        if not _can_be_typed(words):
            yield f"no such command: {' '.join(words)[:80]}"
        yield from refused_values(words)
    if "no claim rests on this page" not in page.read_text(encoding="utf-8"):
        missing = [each for each in commits_of(page) if _git("cat-file", "-e", f"{each}^{{commit}}")]
        yield from (f"commit {each} is not here" for each in missing)
    if not commits_of(page):
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
                for extra in value.split(","):
                    ValueTier.parse(f"host:L=1,N=32,{extra}", "--extras")
        except WinnowError as error:
            yield str(error)


def commits_of(page: Path) -> list[str]:
    text = "".join(
        each.read_text(encoding="utf-8") for each in (page, page.with_suffix(".json")) if each.exists()
    )
    named = [commit for found in _COMMITS.finditer(text) for commit in re.findall(_COMMIT, found[0])]
    return sorted({commit.removesuffix("-dirty") for commit in named})


def notes(page: Path) -> Iterator[str]:
    """Yield why a page might be measured again."""
    if not page.with_suffix(".json").exists():
        yield "keeps no numbers beside it"
    words = {word for command in commands_of(page) for word in command}
    places = [ROOT.joinpath("lab", *word.split(".")) for word in words if word.startswith("winnow_lab.")]
    paths = [str(each) for place in places for each in (place, place.with_suffix(".py")) if each.exists()]
    if paths and any(_git("diff", "--quiet", commit, "HEAD", "--", *paths) for commit in commits_of(page)):
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


def _recorded(value: Any) -> Iterator[list[str]]:
    for key, each in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        if key == "command" and isinstance(each, list):
            yield each
        else:
            yield from _recorded(each)


def _git(*words: str) -> int:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False).returncode  # noqa: S603, S607


def _test_helpers() -> Any:
    sys.path[:0] = [] if str(ROOT / "tests") in sys.path else [str(ROOT / "tests")]
    return import_module("documented")


def main() -> int:
    if sys.argv[1:] != ["check"]:
        print(__doc__)
        return 2
    files = [
        each
        for each in sorted(RESULTS.iterdir())
        if each.suffix in (".md", ".json") and each.stem != "README"
    ]
    pages = [each for each in files if each.suffix == ".md" or not each.with_suffix(".md").exists()]
    broken = {page.name: found for page in pages if (found := list(problems(page)))}
    noted = {page.name: found for page in pages if (found := list(notes(page)))}
    for label, pairs in (("cannot be repeated", broken), ("note", noted)):
        for name, found in pairs.items():
            print(f"{label}: {name}: {'; '.join(dict.fromkeys(found))}")
    print(f"{len(pages)} pages, {len(broken)} that cannot be repeated, {len(noted)} with notes")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
