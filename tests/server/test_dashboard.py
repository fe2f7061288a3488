"""The dashboard: offline, in both colour schemes, with numbers that move, in a real browser where there is one."""

import json
import re
import shutil
import subprocess
import threading
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests.server.browser import BROWSER, Page, open_browser
from tests.server.running import Running, eventually, running

from winnow import LLM, SamplingParams

NODE = shutil.which("node")


@pytest.mark.parametrize(("path", "name"), [("/", "dashboard"), ("/chat", "chat")])
def test_pages_load_nothing(server: Running, path: str, name: str) -> None:
    page = files("winnow.server").joinpath(f"{name}.html").read_text(encoding="utf-8")
    response = server.client.get(path)
    assert response.headers["content-type"].startswith("text/html") and response.text == page
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    scripts = re.findall(r'<script src="([^"]+)"', page)
    for script in scripts:  # no script in the page itself may run
        assert "script-src 'self';" in policy and "<script>" not in page
        found = server.client.get(f"/{script}")
        assert found.headers["content-type"].startswith("text/javascript")
        page += found.text if script.endswith(f"/{name}.js") else ""
    assert scripts[-1] == f"static/{name}.js"
    assert not re.search(r"https?://|@import|<link[^>]*stylesheet|src=\"(?!static/)|innerHTML|eval\(", page)
    assert "prefers-color-scheme: dark" in page
    # Each element that a script looks up by its name is there, once.
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))
    used = set(re.findall(r'\bat\("([^"]+)"\)', page)) | {
        f"{each}-box" for each in re.findall(r'\b(?:has|rows)\("([^"]+)"', page)
    }
    assert used <= set(names)


@pytest.mark.skipif(NODE is None, reason="needs node: apt install nodejs")
@pytest.mark.parametrize("name", ["dashboard", "chat"])
def test_scripts_can_be_read(name: str) -> None:
    script = files("winnow.server").joinpath(f"static/{name}.js")
    subprocess.run([NODE or "", "--check", str(script)], check=True)


def test_pages_that_are_switched_off(llm: LLM) -> None:
    with running(llm, docs=False, dashboard=False) as server:
        for path in ("/", "/chat", "/openapi.json", "/stats/stream"):
            assert server.client.get(path).status_code == 404


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


def test_numbers_move(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.server.pages.INTERVAL", 0.2)
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
    latencies = found[-1]["latencies"]
    assert all(0 < low <= middle <= high for low, middle, high in latencies.values())
    assert any(tenant["bytes"] > 0 for each in found for tenant in each["tenants"])
    for each in found:
        assert each["running"] + each["waiting"] == sum(tenant["answers"] for tenant in each["tenants"])
    assert found[0]["resident_bytes"] > 2**26
    assert found[0]["history"] and not any("history" in each for each in found[1:])
    assert all(len(each) == 7 and each[0] <= found[0]["time"] for each in found[0]["history"])
    [[_, answers, tokens, kept]] = [
        each for each in snapshots(server, 1)[0]["policies"] if each[0] == "snapkv"
    ]
    assert answers >= 2 and 0 < kept < tokens


def test_the_history_is_of_the_last_hour(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.server.pages.HISTORY_SECONDS", 0.05)
    with running(llm) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True}
        server.post("/v1/completions", body).raise_for_status()
        time.sleep(0.3)
        history = snapshots(server, 1)[0]["history"]
    times = [each[0] for each in history]
    assert len(times) > 3 and times == sorted(times) and times[-1] - times[0] < 20
    assert max(each[3] for each in history) > 0 and max(each[5] for each in history) > 0


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
def test_in_a_browser(server: Running, tmp_path: Path) -> None:
    """Texts, numbers that move, no fault in the console, and screenshots in each scheme's colours."""
    named = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "session_id": "s" * 64}
    server.post("/v1/chat/completions", named).raise_for_status()
    stop = threading.Event()
    thread = busy(server, stop)
    try:
        with open_browser(tmp_path / "profile") as page:
            page.open(server.address + "/", "light")
            eventually(lambda: page.text("state") == "live", "the page does not come alive", 60)
            eventually(lambda: "% of the tokens computed" in page.text("kept-text"), "no KVs are shown", 60)
            first = number(page.text("generated"))
            eventually(lambda: number(page.text("generated")) > first, "numbers stand still", 60)
            for line in ("rate", "running", "waiting", "kv"):
                points = page.evaluate(f"document.getElementById('{line}-line').getAttribute('points')")
                assert len(points.split()) >= 2
            eventually(lambda: "whole answer" in page.text("latencies"), "no latency is shown", 60)
            assert "winnow-demo" in page.text("model") and page.text("budget") == "32.0 MiB"
            page.evaluate("document.getElementById('model').textContent += ' ' + 'W'.repeat(200)")
            cells = "document.querySelectorAll('#kept i').length"
            eventually(lambda: page.evaluate(cells) > 4, "no layers and heads are shown", 60)
            eventually(lambda: "everybody" in page.text("tenants"), "no tenant is shown", 60)
            eventually(lambda: number(page.text("evicted")) > 0, "no answer has ended", 60)
            assert page.text("used").endswith("iB")
            for width in (1280, 768, 390):
                page.set_width(width)
                laid_out = f"document.documentElement.scrollWidth <= {width}"
                eventually(lambda: page.evaluate(laid_out), f"the page is wider than {width} px", 60)  # noqa: B023
                wide = "[...document.querySelectorAll('section')].filter(s => s.scrollWidth > s.clientWidth).length"
                assert page.evaluate(wide) == 0, f"a card's content is wider than the card at {width} px"
                gaps = page.evaluate(GAPS)
                assert gaps == 0, f"cards leave room empty at {width} px"
                picture = page.screenshot(tmp_path / f"page-{width}.png")
            assert brightness(picture) > 180
            require_dark(page, tmp_path)
    finally:
        stop.set()
        thread.join()
        server.client.delete(f"/v1/sessions/{named['session_id']}").raise_for_status()


# Rows of cards whose cards end at different heights, or which end before the page's right edge.
GAPS = """
(() => {
  const rows = Object.groupBy([...document.querySelectorAll('section')].filter(s => s.offsetHeight), s => s.offsetTop)
  const edge = document.querySelector('main').getBoundingClientRect().right
  const ends = row => row.map(card => card.getBoundingClientRect())
  return Object.values(rows).map(ends).filter(row => row.some(card => Math.abs(card.bottom - row[0].bottom) > 1)
    || Math.abs(row.at(-1).right - edge) > 1).length
})()
"""


def require_dark(page: Page, tmp_path: Path) -> None:
    page.set_scheme("dark")
    assert brightness(page.screenshot(tmp_path / "dark.png")) < 80
    assert page.faults == []


def require_fit(page: Page, tmp_path: Path) -> None:
    """Nothing is wider than a page of three widths, no word of code is cut in two, and each scheme has its colours."""
    for width in (1280, 768, 390):
        page.set_width(width)
        laid_out = f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}"
        eventually(lambda: page.evaluate(laid_out), f"the page is wider than {width} px", 60)  # noqa: B023
        wide = page.evaluate(
            "[...document.querySelectorAll('body *')].filter(e => e.getClientRects().length "
            "&& e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80)).join()"
        )
        assert wide == "", f"at {width} px"
        halves = "[...document.querySelectorAll('td code')].filter(e => !/\\s/.test(e.textContent) "
        halves += "&& e.getClientRects().length > 1).length"
        assert page.evaluate(halves) == 0, f"at {width} px"
    page.set_scheme("light")
    assert brightness(page.screenshot(tmp_path / "light.png")) > 180
    require_dark(page, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
def test_the_chat_in_a_browser(server: Running, tmp_path: Path) -> None:
    word = "W" * 200
    with open_browser(tmp_path / "profile") as page:
        page.open(server.address + "/chat", "light")
        eventually(lambda: "winnow-demo" in page.text("model"), "the page does not come alive", 60)
        page.evaluate(f"document.getElementById('text').value = 'What is the hobby of {word}?'")
        page.evaluate("document.getElementById('max-tokens').value = 20")
        page.evaluate("document.getElementById('send').click()")
        page.evaluate("document.getElementById('text').value = 'And of Tom?'; send()")
        assert "queued" in page.text("messages") and page.evaluate("current.messages.length") == 2
        eventually(lambda: page.evaluate("current.messages.length === 4 && !running.size"), "no answer", 60)
        assert "tokens/s" in page.text("messages") and "every KV kept" in page.text("messages")
        page.evaluate(f"document.getElementById('model').textContent += ' {word}'")
        assert word in page.text("messages")
        # What a model says is Markdown; what could act in it is shown, or gone.
        said = "| a |\n|---|\n| b |\n\n<img src=x onerror=fetch('/x')> [l](javascript:fetch('/x'))\n\n```py\nx = 1\n```"
        page.evaluate(f"current.messages[3].content = {json.dumps(said)}; save(current); draw()")
        for tag, count in {"td": 1, "pre code": 1, "img": 0, "a[href]": 0}.items():
            assert page.evaluate(f"document.querySelectorAll('.said {tag}').length") == count, tag
        assert "<img src=x" in page.text("messages")
        require_fit(page, tmp_path)
        room = page.evaluate("document.getElementById('text').clientWidth")
        assert room > 300, "there is no room for a question at 390 px"
        # A reload loses nothing, and what was asked can be asked otherwise.
        page.call("Page.reload")
        eventually(lambda: page.evaluate("current?.messages.length") == 4, "the conversation is lost", 60)
        assert "hobby of WWW" in page.text("chats") and "<img src=x" in page.text("messages")
        page.evaluate("edit(current, 2, document.querySelectorAll('article')[2])")
        page.evaluate("document.querySelector('article textarea').value = 'Of Ann?'")
        page.evaluate("document.querySelector('article .first').click()")
        answered = (
            "!running.size && current.messages.length === 4 && current.messages[2].content === 'Of Ann?'"
        )
        eventually(lambda: page.evaluate(answered), "no answer", 60)
        asked = page.evaluate("current.messages[2].content + current.messages[3].content")
        assert asked.startswith("Of Ann?") and "<img" not in asked


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
def test_an_inspection_in_a_browser(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, eviction="snapkv", kv_budget=32)
    prompt = f"What is the hobby of {'W' * 200}? <b>{'a' * 90}</b> & more.\n\n"
    file = tmp_path / "page.html"
    file.write_text(llm.inspect(prompt, params).to_html(), encoding="utf-8")
    with open_browser(tmp_path / "profile") as page:
        page.open(file.as_uri(), "light")
        eventually(
            lambda: page.evaluate("document.querySelectorAll('.text > span').length") > 50, "no token", 60
        )
        require_fit(page, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
def test_the_page_asks_for_a_key(llm: LLM, tmp_path: Path) -> None:
    with running(llm, {"alice": "key-a"}) as server, open_browser(tmp_path / "profile") as page:
        page.open(server.address + "/", "light")
        eventually(lambda: "key is needed" in page.text("state"), "the page asks for nothing", 60)
        page.evaluate("document.getElementById('key').value = 'key-a'")
        page.evaluate("document.querySelector('#login input[type=submit]').click()")
        eventually(lambda: page.text("state") == "live", "the key is of no use", 60)


def number(text: str) -> int:
    return int(text.replace(",", "")) if text.replace(",", "").isdigit() else 0


def brightness(picture: Path) -> float:
    """The mean of an image's pixels, 0 to 255."""
    image = pytest.importorskip("PIL.Image").open(picture).convert("L")
    return float(image.resize((1, 1), resample=4).getpixel((0, 0)))
