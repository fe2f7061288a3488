"""What is said while a model is loaded: nothing of a quick load, lines or a redrawn line of a long one."""

import io
from typing import Any

import pytest

from winnow.cli.loading import LoadingDisplay
from winnow.config import ModelConfig
from winnow.models import load_model
from winnow.progress import listening, report


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def load(stream: Any, clock: Clock, seconds: float, **options: Any) -> str:
    """What is shown of a load whose four parts take `seconds` together."""
    with LoadingDisplay("model.gguf", stream, clock=clock, **options):
        for done in range(4):
            clock.now += seconds / 4
            report("reading weights", done, 4)
    return str(stream.getvalue())


def test_a_quick_load_says_nothing(clock: Clock) -> None:
    assert load(io.StringIO(), clock, 4.9) == ""
    assert load(Terminal(), clock, 0.9) == ""


def test_quiet(clock: Clock) -> None:
    assert load(io.StringIO(), clock, 24.0, quiet=True) == ""


def test_lines_of_a_long_load(clock: Clock) -> None:
    assert load(io.StringIO(), clock, 24.0).splitlines() == [
        "winnow: loading model.gguf: reading weights 0 %, 6 s",
        "winnow: loading model.gguf: reading weights 25 %, 12 s",
        "winnow: loading model.gguf: reading weights 50 %, 18 s",
        "winnow: loading model.gguf: reading weights 75 %, 24 s",
        "winnow: loaded model.gguf in 24.0 s",
    ]


def test_a_terminal_is_redrawn(clock: Clock) -> None:
    *drawn, last = load(Terminal(), clock, 4.0).split("\r\x1b[K")
    assert drawn == [
        "",
        *(f"winnow: loading model.gguf: reading weights {25 * n} %, {n + 1} s" for n in range(4)),
    ]
    assert last == "winnow: loaded model.gguf in 4.0 s\n"


def test_a_server_says_so_at_once(clock: Clock) -> None:
    shown = load(io.StringIO(), clock, 0.4, announce=True).splitlines()
    assert shown == ["winnow: loading model.gguf", "winnow: loaded model.gguf in 0.4 s"]


def test_a_failed_load_leaves_the_last_word_to_the_error(clock: Clock) -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError, match="damaged"), LoadingDisplay("m", stream, clock=clock, announce=True):
        raise ValueError("damaged")
    assert stream.getvalue() == "winnow: loading m\n"


def test_loading_reports_its_parts() -> None:
    heard: list[str] = []
    with listening(lambda stage, done, total: heard.append(stage)):
        load_model(ModelConfig())
    assert list(dict.fromkeys(heard)) == ["reading weights", "reading the tokenizer", "packing layers"]
