"""Images of clients, files of prompts and callers reach one model alike: answers are those of the same tokens."""

import base64
import io
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("fastapi")

from PIL import Image
from tests.media.vision import FIRST, MARK, SECOND, png, uri
from tests.server.browser import BROWSER, open_browser
from tests.server.running import Running, events, eventually, running
from tests.server.test_dashboard import require_fit

from winnow import LLM, SamplingParams
from winnow.cli.main import main

CHAT, MESSAGES, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"
MAX_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def question(*parts: Any, text: str = "w1 w2") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
TWO = question(part(uri(FIRST)), part(uri(SECOND)))


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with running(llm) as server:
        yield server


@pytest.fixture(scope="module")
def expected(llm: LLM) -> Any:
    """The answer to the question with both pictures, which the template writes so."""
    prompt = {"prompt": f"w9 {MARK}{MARK} w1 w2 </s>w8 ", "multi_modal_data": {"image": [FIRST, SECOND]}}
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert len(output.images) == 2
    return output


@pytest.mark.parametrize(
    "form",
    [
        lambda image: {"type": "image_pil", "image_pil": image},
        lambda image: {"type": "image", "image": png(image)},
        lambda image: {"type": "image", "image": image.convert("RGBA")},
        lambda image: part(uri(image)),
    ],
)
def test_python(llm: LLM, expected: Any, form: Any) -> None:
    [output] = llm.chat(question(form(FIRST), form(SECOND)), GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert [each.digest for each in output.images] == [each.digest for each in expected.images]


def test_files_and_order(llm: LLM, expected: Any) -> None:
    named = question(part("first.png"), part(uri(SECOND)))
    assert llm.chat(named, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected.outputs[0].token_ids
    [swapped] = llm.chat(question(part(uri(SECOND)), part("first.png")), GREEDY, use_tqdm=False)
    assert [each.digest for each in swapped.images] == [each.digest for each in expected.images][::-1]
    assert swapped.outputs[0].token_ids != expected.outputs[0].token_ids


def test_an_openai_client(server: Running, expected: Any) -> None:
    openai = pytest.importorskip("openai")
    text, count = expected.outputs[0].text, len(expected.prompt_token_ids)
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "m", "messages": TWO, "temperature": 0, "max_tokens": MAX_TOKENS}
        answer = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
        assert answer.choices[0].message.content == text
        assert answer.usage.prompt_tokens == count
        chunks = client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == text
        content = [
            {"type": "input_image", "image_url": uri(FIRST), "detail": "auto"},
            {"type": "input_image", "image_url": uri(SECOND), "detail": "high"},
            {"type": "input_text", "text": "w1 w2"},
        ]
        given = {
            "model": "m",
            "temperature": 0,
            "max_output_tokens": MAX_TOKENS,
            "extra_body": {"ignore_eos": True},
        }
        answer = client.responses.create(input=[{"role": "user", "content": content}], **given)
        assert answer.output_text == text and answer.usage.input_tokens == count
        behind = client.responses.create(input="w3", previous_response_id=answer.id, **given)
        assert behind.usage.input_tokens > count, "the pictures of the turn before are not there"
        with pytest.raises(openai.BadRequestError, match=r"images\[0\] .* is no image file"):
            client.chat.completions.create(model="m", messages=question(part("data:image/png;base64,AAAA")))


def test_an_anthropic_client(server: Running, expected: Any) -> None:
    anthropic = pytest.importorskip("anthropic")

    def block(image: Image.Image) -> dict[str, Any]:
        data = base64.b64encode(png(image)).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    messages = question(block(FIRST), block(SECOND))
    greedy = {"temperature": 0, "ignore_eos": True}  # clients from 2.x on know no temperature
    asked = {"model": "m", "max_tokens": MAX_TOKENS, "extra_body": greedy}
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as client:
        answer = client.messages.create(messages=messages, **asked)
        assert answer.content[0].text == expected.outputs[0].text
        counted = client.messages.count_tokens(model="m", messages=messages).input_tokens
        assert counted == len(expected.prompt_token_ids)
        use = {"type": "tool_use", "id": "t", "name": "w5", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [block(FIRST)]}
        turns = [
            {"role": "user", "content": "w1"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        assert client.messages.count_tokens(model="m", messages=turns).input_tokens > counted // 2
        with pytest.raises(anthropic.BadRequestError, match=r"at most 2 \(limit_mm_per_prompt\), got 3"):
            client.messages.create(messages=question(*[block(FIRST)] * 3), **asked)


def test_what_langchain_sends(server: Running, expected: Any) -> None:
    """The body of ChatOpenAI.invoke with text and images, recorded; and tokens as they are counted."""
    body = {
        "messages": TWO,
        "model": "m",
        "stream": False,
        "temperature": 0.0,
        "max_completion_tokens": MAX_TOKENS,
    }
    answer = server.post(CHAT, body | {"ignore_eos": True}).json()
    assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert server.post(TOKENIZE, {"messages": TWO}).json()["tokens"] == expected.prompt_token_ids


def test_one_bad_picture_fails_alone(server: Running, expected: Any) -> None:
    bad = [
        (uri(FIRST)[:90], "damaged|no image"),
        ("https://images.test/a.png", "allowed_media_domains"),
        ("../a.png", "below allowed_local_media_path"),
        ("data:text/html;base64,AAAA", "text/html"),
    ]
    bodies = [ASKED | {"messages": TWO}, *(ASKED | {"messages": question(part(each))} for each, _ in bad)] * 2
    with ThreadPoolExecutor(8) as threads:
        answers = [each.json() for each in threads.map(lambda body: server.post(CHAT, body), bodies)]
    for index, answer in enumerate(answers):
        if index % 5 == 0:
            assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text
        else:
            assert re.search(bad[index % 5 - 1][1], answer["error"]["message"]), answer
            assert answer["error"]["type"] == "invalid_request_error"
    stream = server.post(CHAT, ASKED | {"messages": TWO, "stream": True})
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in events(stream.text)) == (
        expected.outputs[0].text
    )


def test_a_file_of_prompts(model: Path, folder: Path, tmp_path: Path, expected: Any) -> None:
    prompt = f"w9 {MARK}{MARK} w1 w2 </s>w8 "
    body = {"model": "m", **ASKED, "messages": TWO}
    lines = [
        {"prompt": prompt, "multi_modal_data": {"image": ["first.png", uri(SECOND)]}},
        {"prompt": prompt, "multi_modal_data": {"image": ["missing.png", uri(SECOND)]}},
        {"prompt": prompt, "multi_modal_data": {"image": [uri(SECOND)]}},
        {"messages": question(part(f"file://{folder}/first.png"), part(uri(SECOND)))},
        {"custom_id": "a", "method": "POST", "url": CHAT, "body": body},
        {"custom_id": "b", "method": "POST", "url": CHAT, "body": body | {"messages": question(part("data:,"))}},
    ]  # fmt: skip
    asked, answered = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    asked.write_text("".join(json.dumps(each) + "\n" for each in lines))
    flags = [
        "--kv-memory",
        "4MiB",
        "--block-size",
        "4",
        "--temperature",
        "0",
        "--max-tokens",
        str(MAX_TOKENS),
    ]
    code = main(
        ["run", str(asked), "-o", str(answered), "--model", str(model), "--allowed-local-media-path", str(folder),
         "--ignore-eos", "--progress", "off", *flags]
    )  # fmt: skip
    found = [json.loads(line) for line in answered.read_text().splitlines()]
    text = expected.outputs[0].text
    assert code == 1
    assert [found[index]["text"] for index in (0, 3)] == [text, text]
    assert found[4]["response"]["body"]["choices"][0]["message"]["content"] == text
    assert "images[0]: 'missing.png' cannot be read" in found[1]["error"]["message"]
    assert "once for each of its 1 images, got it 2 times" in found[2]["error"]["message"]
    assert "data: URI in Base64" in found[5]["error"]["message"]


DROPPED = """
const data = new DataTransfer(), bytes = Uint8Array.from(atob(%s), each => each.charCodeAt(0));
data.items.add(new File([bytes], "a.png", { type: "image/png" }));
data.items.add(new File(["text"], "a.txt", { type: "text/plain" }));
at("text").dispatchEvent(new %s, { %s: data, bubbles: true, cancelable: true }));
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
def test_images_on_the_chat_page(server: Running, expected: Any, tmp_path: Path) -> None:
    """One is dropped, one pasted, a third taken back; the server reads the two, and a large one is scaled first."""

    def count() -> Any:
        return page.evaluate("at('pictures').children.length")

    def give(image: Image.Image, event: str, data: str, **saved: Any) -> None:
        file = io.BytesIO()
        image.save(file, "PNG", **saved)
        before, text = count(), json.dumps(base64.b64encode(file.getvalue()).decode())
        page.evaluate("{" + DROPPED % (text, event, data) + "}")
        eventually(lambda: count() == before + 1, "the image is not shown")

    with open_browser(tmp_path / "profile") as page:
        page.open(server.address + "/chat", "light")
        eventually(lambda: "context" in page.text("model"), "the page does not come alive", 60)
        give(FIRST, 'DragEvent("drop"', "dataTransfer")
        give(SECOND, 'ClipboardEvent("paste"', "clipboardData")
        give(SECOND, 'DragEvent("drop"', "dataTransfer")
        page.evaluate("at('pictures').children[2].click()")
        assert count() == 2
        require_fit(page, tmp_path)
        page.evaluate("at('text').value = 'w1 w2'; at('temperature').value = 0; at('max-tokens').value = 6")
        page.evaluate("at('send').click()")
        eventually(lambda: page.evaluate("current.messages.length") == 2, "nothing is answered", 60)
        assert count() == 0
        assert page.evaluate("current.messages[0].content.map(each => each.image_url?.url ?? each.text)") == [
            uri(FIRST), uri(SECOND), "w1 w2",
        ]  # fmt: skip
        assert expected.outputs[0].text.startswith(str(page.evaluate("current.messages[1].content")))
        assert page.evaluate("document.querySelectorAll('article.user img').length") == 2
        require_fit(page, tmp_path)
        shown = page.evaluate(
            "[...document.querySelectorAll('article.user img')].every(each => each.naturalWidth > 0)"
        )
        assert shown, "the policy of the page blocks its images"
        # Above 4 MB, and soon read.
        give(Image.new("L", (2400, 1800)), 'DragEvent("drop"', "dataTransfer", compress_level=0)
        assert page.evaluate("pictures[0].slice(0, 23)") == "data:image/jpeg;base64,"
        size = Image.open(
            io.BytesIO(base64.b64decode(str(page.evaluate("pictures[0]")).partition(",")[2]))
        ).size
        assert size == (2048, 1536)
        assert page.faults == []
