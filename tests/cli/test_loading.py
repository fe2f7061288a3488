"""What is said while a model is loaded: nothing of a quick load, lines or a redrawn line of a long one."""

import io
import re
import time
from typing import Any

import pytest

from winnow.cli.loading import show_loading
from winnow.config import ModelConfig
from winnow.models import DEMO_MODEL, load_model
from winnow.process.progress import listening, report

PATIENT: dict[str, float] = {"patience": 600.0}
IMPATIENT = {"patience": 0.01, "every": 0.01}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(stream: io.StringIO, text: str) -> None:
    """Wait until `text` is shown: the display writes at its own pace."""
    end = time.monotonic() + 60
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.001)


def load(stream: io.StringIO, **options: Any) -> str:
    """What is shown of a load that continues once a line of each of its parts is seen."""
    with show_loading("model.gguf", stream, **IMPATIENT, **options):
        wait_for(stream, "loading model.gguf, ")  # before anything reports
        for done in range(4):
            report("reading weights", done, 4)
            wait_for(stream, f"{25 * done} %")
    return re.sub(r", \d+ s\b", ", 0 s", stream.getvalue())


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
@pytest.mark.parametrize("options", [PATIENT, {**IMPATIENT, "quiet": True}])
def test_nothing_is_said_of_a_quick_load_or_on_request(stream: io.StringIO, options: dict[str, Any]) -> None:
    with show_loading("model.gguf", stream, **options):
        report("reading weights", 1, 4)
        time.sleep(0.05)
    assert stream.getvalue() == ""


def test_lines_of_a_long_load() -> None:
    lines = list(dict.fromkeys(load(io.StringIO()).splitlines()))
    assert lines[:-1] == [
        "winnow: loading model.gguf, 0 s",
        *(f"winnow: loading model.gguf: reading weights {25 * n} %, 0 s" for n in range(4)),
    ]
    assert re.fullmatch(r"winnow: loaded model\.gguf in \d\.\d s", lines[-1])


def test_a_terminal_is_redrawn() -> None:
    before, *drawn, last = load(Terminal()).split("\r\x1b[K")
    assert before == "" and list(dict.fromkeys(drawn)) == [
        "winnow: loading model.gguf, 0 s",
        *(
            f"winnow: loading model.gguf: reading weights {25 * n} % [{('=' * 6 * n):24}], 0 s"
            for n in range(4)
        ),
    ]
    assert re.fullmatch(r"winnow: loaded model\.gguf in \d\.\d s\n", last)


def test_bytes_have_a_rate() -> None:
    stream = io.StringIO()
    with show_loading("m", stream, **IMPATIENT, doing="fetching"):
        report("fetching", 0, 2**21, "B")
        time.sleep(0.1)
        report("fetching", 2**20, 2**21, "B")
        wait_for(stream, "50 %")
    [rate] = set(
        re.findall(r"fetching m: fetching 50 % 1\.0 MiB of 2\.0 MiB, ([\d.]+) MiB/s", stream.getvalue())
    )
    assert 0 < float(rate) <= 10


def test_a_server_says_so_at_once() -> None:
    stream = io.StringIO()
    with show_loading("model.gguf", stream, announce=True):
        assert stream.getvalue() == "winnow: loading model.gguf\n"
    assert re.fullmatch(r"winnow: loaded model\.gguf in \d\.\d s", stream.getvalue().splitlines()[1])


def test_a_failed_load_leaves_the_last_word_to_the_error() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError, match="damaged"), show_loading("m", stream, announce=True):
        raise ValueError("damaged")
    assert stream.getvalue() == "winnow: loading m\n"


def test_loading_reports_its_parts() -> None:
    heard: list[str] = []
    read: list[tuple[int, int]] = []

    def hear(stage: str, done: int, total: int, unit: str) -> None:
        heard.append(stage)
        if unit == "B":
            read.append((done, total))

    with listening(hear):
        load_model(ModelConfig())
    assert read == sorted(read) and read[0][0] == 0 and len(read) > 10
    size = sum(each.stat().st_size for each in DEMO_MODEL.glob("*.safetensors"))
    assert size / 2 < read[-1][0] < read[-1][1] <= size
    assert list(dict.fromkeys(heard)) == [
        "importing transformers",
        "reading weights",
        "reading the tokenizer",
        "packing layers",
    ]
