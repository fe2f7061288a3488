"""A worker of NVIDIA Dynamo behind Dynamo's own frontend: `make test-dynamo`."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("dynamo.common")

from dynamo.common.constants import DisaggregationMode

from winnow import LLM, SamplingParams
from winnow.errors import ConfigError, InvalidRequestError
from winnow_dynamo.worker import WinnowEngine

OPTIONS: dict[str, Any] = {"kv_memory": "16MiB", "threads": 1}
FLAGS = ("--kv-memory", "16MiB", "--threads", "1", "--served-model-name", "demo")
PROMPT = "Once upon a time there was a child who had a dog." + " The child went home with the dog." * 8
PD = {"eviction": "kv-compress-pd", "kv_budget": 40, "prefill_chunk": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


class Context:
    """The part of Dynamo's context that an engine reads."""

    def __init__(self, name: str) -> None:
        self._name = name

    def id(self) -> str:
        return self._name


@contextmanager
def process(log: Path, env: dict[str, str], *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        found = subprocess.Popen([sys.executable, "-m", *words], env=env, stdout=file, stderr=file)
    try:
        yield found
    finally:
        found.send_signal(signal.SIGTERM)
        try:
            found.wait(20)
        except subprocess.TimeoutExpired:
            found.kill()


@contextmanager
def frontend(tmp_path: Path, workers: Sequence[Sequence[str]]) -> Iterator[httpx.Client]:
    """Dynamo's frontend and workers, which find each other by files."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # A worker waits so long before it ends, for requests that are still on their way.
    env = os.environ | {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path / "discovery")}
    env |= {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0", "HF_HUB_OFFLINE": "1"}
    with ExitStack() as stack:
        for number, flags in enumerate(workers):
            log = tmp_path / f"worker{number}.log"
            stack.enter_context(process(log, env, "winnow_dynamo", *FLAGS, *flags))
        words = ("dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port))
        stack.enter_context(process(tmp_path / "frontend.log", env, *words))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=60))
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.5)
            try:
                if client.get("/models").json()["data"] and ask(client).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
        yield client


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return client.post("/completions", json=body | more)


@pytest.fixture(scope="module")
def expected() -> str:
    return answer_of_one_process(OPTIONS)


def answer_of_one_process(options: dict[str, Any]) -> str:
    with LLM(**options) as llm:
        # The frontend puts no token before a prompt that is no chat.
        prompt = llm.tokenize(PROMPT, add_special_tokens=False).token_ids
        return str(llm.generate([prompt], GREEDY)[0].outputs[0].text)


def test_the_frontend_streams_from_a_worker(tmp_path: Path, expected: str) -> None:
    with frontend(tmp_path, [()]) as client:
        assert ask(client).json()["choices"][0]["text"] == expected
        answer = ask(client, stream=True)
        again = ask(client).json()["usage"]
    assert answer.text.count("data: ") > 4 and answer.text.rstrip().endswith("data: [DONE]")
    assert again["prompt_tokens_details"]["cached_tokens"] > 50


@pytest.mark.parametrize("eviction", [{}, PD])
def test_one_process_prefills_and_another_decodes(tmp_path: Path, eviction: dict[str, Any]) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in eviction.items()]
    store = ("--prefix-cache-dir", str(tmp_path / "store"), *words)
    prefill = (*store, "--disaggregation-mode", "prefill", "--component", "prefill")
    roles = [prefill, (*store, "--disaggregation-mode", "decode")]
    expected = answer_of_one_process(OPTIONS | eviction)
    with frontend(tmp_path, roles) as client:
        body = ask(client, prompt=PROMPT).json()
    assert body["choices"][0]["text"] == expected
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
    assert list((tmp_path / "store").glob("*.safetensors"))


def test_an_engine_by_itself() -> None:
    """Also what Dynamo asks of every engine: `abort` ends a request, and `cleanup` may come twice."""

    async def drive() -> None:
        engine = WinnowEngine(OPTIONS, "demo", DisaggregationMode.AGGREGATED)
        await engine.cleanup()
        config = await engine.start(1)
        assert config.llm.kv_cache_block_size == 16 and config.llm.total_kv_blocks > 100
        log = SimpleNamespace(stored=[], removed=[])
        publisher = SimpleNamespace(
            publish_stored=lambda *block: log.stored.append(block), publish_removed=log.removed.append
        )
        [source] = await engine.kv_event_sources()
        source.on_ready(publisher)
        tokens = list(range(5, 75))
        request = {"token_ids": tokens, "stop_conditions": {"max_tokens": 3, "ignore_eos": True}}
        chunks = [chunk async for chunk in engine.generate(request, Context("a"))]
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == 3
        assert chunks[-1]["finish_reason"] == "length"
        assert chunks[-1]["completion_usage"]["total_tokens"] == 73
        assert [block[0] for block in log.stored] == [tokens[at : at + 16] for at in range(0, 64, 16)]
        assert [block[3] for block in log.stored[1:]] == [block[2][0] for block in log.stored[:-1]]
        endless = {"token_ids": tokens, "stop_conditions": {"max_tokens": 1000, "ignore_eos": True}}
        stream = engine.generate(endless, Context("b"))
        await anext(stream)
        await engine.abort(Context("b"))
        await stream.aclose()
        with pytest.raises(InvalidRequestError):
            await anext(engine.generate(request | {"sampling_options": {"temperature": -1}}, Context("c")))
        await engine.cleanup()
        await engine.cleanup()

    asyncio.run(drive())


def test_roles_are_checked(tmp_path: Path) -> None:
    async def decode() -> None:
        engine = WinnowEngine(OPTIONS | {"prefix_cache_dir": tmp_path}, "demo", DisaggregationMode.DECODE)
        await engine.start(1)
        try:
            with pytest.raises(ValueError, match="no prefill_result"):
                await anext(engine.generate({"token_ids": [5, 6]}, Context("a")))
        finally:
            await engine.cleanup()

    asyncio.run(decode())
    with pytest.raises(ConfigError, match="disaggregation_mode prefill needs prefix_cache_dir"):
        asyncio.run(WinnowEngine.from_args(["--disaggregation-mode", "prefill"]))
