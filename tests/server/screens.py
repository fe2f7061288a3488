"""Pictures of the pages, of a run's display and of an inspection, for docs/screens.

python -m tests.server.screens DIRECTORY [MODEL]; the model answers in the chat.
"""

import json
import os
import pty
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
from rich.text import Text
from tests.server.browser import Page, open_browser
from tests.server.running import Running, eventually, running

from winnow import LLM, SamplingParams

WIDTHS = {"wide": (1100, 700), "narrow": (390, 760)}
SCHEMES = ("light", "dark")
STORY = "Once upon a time there was a girl who loved to row. " * 12
COLUMNS = 100


def shoot(page: Page, directory: Path, name: str) -> None:
    for scheme in SCHEMES:
        page.set_scheme(scheme)
        for width, (columns, rows) in WIDTHS.items():
            size = {"width": columns, "height": rows, "deviceScaleFactor": 1, "mobile": False}
            page.call("Emulation.setDeviceMetricsOverride", **size)
            eventually(lambda columns=columns: page.evaluate("innerWidth") == columns, "no new width", 60)  # type: ignore[misc]
            page.screenshot(directory / f"{name}-{width}-{scheme}.png")
    assert page.faults == [], page.faults


def ask(server: Running, number: int) -> None:
    body = {
        "messages": [{"role": "user", "content": STORY + f" What did she row? {number}"}],
        "max_tokens": 24,
    }
    body |= {"session_id": f"talk {number % 3}"}
    server.post("/v1/chat/completions", body).raise_for_status()


def pages(directory: Path, page: Page, model: str | None) -> None:
    with LLM(kv_memory="16MiB", eviction="winnow", compression=4) as llm, running(llm) as server:
        for number in range(9):
            ask(server, number)
        page.open(server.address + "/", "light")
        eventually(lambda: page.text("state") == "live", "the dashboard does not come alive", 60)
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, server, number) for number in range(200)]
            eventually(lambda: sum(map(Future.done, answers)) > 150, "no answers", 300)
            shoot(page, directory, "dashboard")
        page.open("about:blank", "light")  # which ends its stream before the server ends
    with LLM(model, kv_memory="64MiB") as llm, running(llm) as server:
        page.open(server.address + "/chat", "light")
        eventually(lambda: page.evaluate("document.readyState") == "complete", "no chat", 60)
        said = json.dumps("Name three things that lie in a boat, as a list.")
        page.evaluate(f"document.getElementById('text').value = {said}")
        page.evaluate("document.getElementById('text').form.requestSubmit()")
        eventually(lambda: page.evaluate("!running.size && current?.messages.length === 2"), "no answer", 300)
        shoot(page, directory, "chat")


def inspection(directory: Path, page: Page, scratch: Path) -> None:
    with LLM() as llm:
        params = SamplingParams(temperature=0, max_tokens=16, eviction="snapkv", kv_budget=48)
        file = scratch / "inspection.html"
        file.write_text(llm.inspect(STORY, params).to_html(), encoding="utf-8")
    page.open(file.as_uri(), "light")
    eventually(lambda: page.evaluate("document.querySelectorAll('.text > span').length") > 50, "no token", 60)
    shoot(page, directory, "inspect")


def run_display(directory: Path, page: Page, scratch: Path) -> None:
    """The bar in the middle of a run and the closing table, as a terminal shows them."""
    prompts = scratch / "prompts.jsonl"
    lines = [{"prompt": STORY + str(number), "max_tokens": 40} for number in range(200)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    seen = b""

    def read(descriptor: int) -> bytes:
        nonlocal seen
        data = os.read(descriptor, 2**16)
        seen += data
        return data

    command = [sys.executable, "-m", "winnow", "run", str(prompts), "-o", str(scratch / "answers.jsonl")]
    status = pty.spawn([*command, "--kv-memory", "16MiB"], read)
    assert status == 0, seen[-2000:]
    text = seen.decode().replace("\r\n", "\n").split("\r")
    bars = [each for each in text if "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in each] or text
    shown = bars[len(bars) // 2].rstrip() + "\n\n" + text[-1].partition("\n")[2]
    for scheme, theme in zip(SCHEMES, (DEFAULT_TERMINAL_THEME, MONOKAI), strict=True):
        console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(Text.from_ansi(shown))
        file = scratch / f"{scheme}.html"
        file.write_text(console.export_html(theme=theme), encoding="utf-8")
        page.open(file.as_uri(), scheme)
        size: dict[str, Any] = {"width": 1000, "height": 470, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        eventually(lambda: page.evaluate("document.readyState") == "complete", "no page", 60)
        page.screenshot(directory / f"run-{scheme}.png")


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, open_browser(Path(scratch) / "profile") as page:
        pages(directory, page, sys.argv[2] if len(sys.argv) > 2 else None)
        inspection(directory, page, Path(scratch))
        run_display(directory, page, Path(scratch))


if __name__ == "__main__":
    main()
