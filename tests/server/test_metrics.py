"""What Prometheus reads, and the board that reads it."""

import json
import re
import time
from pathlib import Path

import pytest
from tests.server.running import Running, running

from winnow import LLM
from winnow.engine.answer_check import AnswerCheck

BOARD = Path(__file__).parents[2] / "examples" / "serving" / "grafana.json"


def names(text: str) -> set[str]:
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line and not line.startswith("#")}


def test_the_board_asks_for_what_is_served(server: Running) -> None:
    body = {"prompt": list(range(100, 400)), "max_tokens": 4, "eviction": "snapkv", "kv_budget": 64}
    assert server.post("/v1/completions", body).status_code == 200
    served = names(server.client.get("/metrics").text)
    asked = set(re.findall(r"winnow_\w+", json.dumps(json.loads(BOARD.read_text())["panels"])))
    assert asked and asked <= served, asked - served


def test_compressed_answers_are_compared_in_idle_time(
    server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnswerCheck, "due", lambda self, *_: bool(self._waiting))
    body = {"prompt": list(range(200, 500)), "max_tokens": 4, "temperature": 0, "compression": 2}
    body |= {"eviction": "snapkv", "ignore_eos": True}
    count = r"^winnow_%s(?:\{.*\})? (\S+)$"
    for _ in range(400):
        usage = server.post("/v1/completions", body).json()["usage"]
        if usage["kv"].get("checked_answers"):
            break
        time.sleep(0.05)
    monkeypatch.setattr(AnswerCheck, "due", lambda *_: False)
    found = llm.check_answers()  # also of the one in progress
    assert 0 < usage["kv"]["checked_answers"] <= found.checked and "equal_answers" in usage["kv"]
    text = server.client.get("/metrics").text
    for name, value in (("", found.checked), ("_equal", found.equal)):
        assert re.findall(count % f"checked_answers{name}_total", text, re.MULTILINE) == [f"{value:.1f}"]


def test_aliases_of_vllm(server: Running) -> None:
    """Those that vLLM's own board and routers read."""
    served = names(server.client.get("/metrics").text)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
    ):
        assert f"vllm:{name}" in served
    text = server.client.get("/metrics").text
    [blocks] = re.findall(r'vllm:cache_config_info\{.*block_size="16".*num_gpu_blocks="(\d+)".*\} 1', text)
    assert int(blocks) > 10
    labels = re.findall(r"vllm:num_requests_running\{(.*)\}", text)
    assert labels == ['engine="0",model_name="winnow-demo"'] or labels == [
        'model_name="winnow-demo",engine="0"'
    ]


def test_tenants_are_counted_apart(llm: LLM) -> None:
    with running(llm, {"alice": "key-a", "bob": "key-b"}, open_metrics=True) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        for path, asked in (
            ("/v1/completions", body),
            ("/v1/completions", body | {"stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ):
            assert server.post(path, asked, headers={"authorization": "Bearer key-a"}).status_code == 200
        text = server.client.get("/metrics").text  # without a key
        assert "vllm:" not in text
        lines = [line for line in text.splitlines() if line.startswith("winnow_tenant_tokens_total")]
        [found] = [line for line in lines if 'kind="generation"' in line and 'tenant="alice"' in line]
        assert float(found.split()[-1]) == 9
        assert 'tenant="bob"' not in text
        assert "key-a" not in text
