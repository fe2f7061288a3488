"""A function of Python's standard library, repeated by its name among many others."""

import ast
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

from winnow.errors import EvaluationError
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.task import CountTokens, TaskSettings, check_lengths

_MODULES = ("argparse", "csv", "difflib", "shutil", "smtplib", "statistics", "tarfile", "textwrap", "zipfile")
_LINES = range(4, 10)


class CodeTask:
    """Functions of 4 to 9 lines; the prompt ends with the first line of one of them, which is there as it stands.

    The answer to `line` is the line that follows, to `body` all lines of the function. Prompts are the same in every
    run under the same version of Python.
    """

    summary = "a function of Python's standard library, by its first line"
    categories = ("line", "body")

    def samples(self, settings: TaskSettings) -> list[Sample]:
        check_lengths(settings)
        count, asked = settings.samples or 10, settings.categories or self.categories
        return [
            _sample(settings, each, n, at) for n in settings.tokens for each in asked for at in range(count)
        ]


CODE = CodeTask()


def _sample(settings: TaskSettings, category: str, tokens: int, number: int) -> Sample:
    rng = random.Random(f"{settings.seed}/code/{tokens}/{number}")
    texts = rng.sample(_functions(), len(_functions()))
    name, count = f"{category}/{tokens}/{number}", settings.count_tokens
    asked = [_question(text, category, count) for text in texts[: settings.questions]]
    room = tokens - max(count(each.plain) + each.max_tokens for each in asked)
    taken: list[str] = []
    for text in texts:
        if count("\n\n".join([*taken, text])) > room:
            break
        taken.append(text)
    if not settings.questions <= len(taken) < len(texts):
        raise EvaluationError(f"--tokens {tokens}: {len(taken)} of {len(texts)} functions fit")
    rng.shuffle(taken)
    return Sample(name, category, "\n\n".join(taken), tuple(asked), length=tokens)


def _question(text: str, category: str, count_tokens: CountTokens) -> Question:
    first, *lines = text.splitlines()
    answer = lines[0].strip() if category == "line" else "\n".join(lines)
    return Question(f"\n\n{first}", (answer,), "match-part", count_tokens(text) + 8)


@cache
def _functions() -> tuple[str, ...]:
    """Functions whose first lines are all different, in the order of the modules."""
    found = {text.partition("\n")[0]: text for name in _MODULES for text in _of_module(name)}
    return tuple(found.values())


def _of_module(name: str) -> Iterator[str]:
    source = (Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            text = dedent("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]))
            one_line = node.body[0].lineno == node.lineno + 1  # its head; then the body
            if one_line and len(text.splitlines()) in _LINES and "\n\n" not in text:
                yield text
