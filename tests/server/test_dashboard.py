"""The dashboard: offline, in both colour schemes, with numbers that move, in a real browser where there is one."""

import json
import re
import shutil
import subprocess
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests.server.running import Running, eventually

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGE = files("winnow.server").joinpath("dashboard.html").read_text(encoding="utf-8")


def test_the_page_loads_nothing(server: Running) -> None:
    response = server.client.get("/")
    assert response.headers["content-type"].startswith("text/html") and response.text == PAGE
    assert not re.search(r"https?://|@import|<link[^>]*stylesheet|src=", PAGE)
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "prefers-color-scheme: dark" in PAGE


def snapshots(server: Running, count: int) -> list[dict[str, Any]]:
    found = []
    with server.client.stream("GET", "/stats/stream") as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
            if len(found) == count:
                break
    return found


def busy(server: Running, stop: threading.Event) -> threading.Thread:
    """Keep the server answering until `stop`."""

    def ask() -> None:
        while not stop.is_set():
            body = {"prompt": list(range(100, 400)), "max_tokens": 150, "ignore_eos": True, "n": 2}
            server.post(
                "/v1/completions", body | {"eviction": "snapkv", "kv_budget": 64, "context_tokens": 250}
            )

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_numbers_move(server: Running) -> None:
    stop = threading.Event()
    thread = busy(server, stop)
    try:
        eventually(lambda: server.client.get("/load").json()["server_load"] > 0, "nothing runs")
        found = snapshots(server, 3)
    finally:
        stop.set()
        thread.join()
    assert found[-1]["generated_tokens"] > found[0]["generated_tokens"]
    assert any(each["generated_per_second"] > 0 for each in found)
    shown = [each for each in found if each["kept"]]
    assert shown and all(0 < part <= 1 for layer in shown[0]["kept"] for part in layer)
    assert any(tenant["bytes"] > 0 for each in found for tenant in each["tenants"])


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(server: Running, tmp_path: Path, scheme: str) -> None:
    """Texts, numbers that moved, no console error, and a screenshot whose colours are the scheme's."""
    assert BROWSER is not None
    common = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", "--v=0", "--window-size=1200,1400",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
    ]  # fmt: skip
    stop = threading.Event()
    thread = busy(server, stop)
    try:
        dumped = subprocess.run(
            [*common, "--timeout=6000", "--dump-dom", server.address + "/"],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        picture = tmp_path / "page.png"
        subprocess.run(
            [*common, "--timeout=6000", f"--screenshot={picture}", server.address + "/"],
            capture_output=True, timeout=120, check=True,
        )  # fmt: skip
    finally:
        stop.set()
        thread.join()
    assert "CONSOLE" not in dumped.stderr, dumped.stderr
    text = dumped.stdout

    def shown(name: str) -> str:
        found = re.search(rf'id="{name}"[^>]*>([^<]*)<', text)
        assert found is not None, name
        return found[1]

    assert shown("state") == "live" and "winnow-demo" in shown("model")
    assert int(shown("generated").replace(",", "")) > 0
    assert shown("budget") == "32.0 MiB"
    assert "% of the tokens computed" in shown("kept-text")
    assert "everybody" in text
    points = re.search(r'id="rate-line" points="([^"]+)"', text)
    assert points is not None and len(points[1].split()) >= 2
    assert brightness(picture) > 180 if scheme == "light" else brightness(picture) < 80


def brightness(picture: Path) -> float:
    """The mean of an image's pixels, 0 to 255."""
    image = pytest.importorskip("PIL.Image").open(picture).convert("L")
    pixels = list(image.resize((64, 64)).getdata())
    return sum(pixels) / len(pixels)
