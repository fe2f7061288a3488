"""`winnow bench serve`: arrivals, sums, and a server under load."""

import asyncio
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from winnow.cli.main import main
from winnow.errors import ConfigError
from winnow_lab.bench.serve import LoadClient, LoadRequest, Outcome, summarise
from winnow_lab.cli.bench.serve import Options, arrivals, random_requests


def test_arrivals_follow_rate_and_burstiness() -> None:
    requests = [LoadRequest("a", 1)] * 2000
    spread = {}
    for burstiness in (0.2, 1.0, 5.0):
        found = arrivals(Options(request_rate=10, burstiness=burstiness), requests)
        assert found == sorted(found) and found[-1] == pytest.approx(200)
        gaps = [b - a for a, b in pairwise(found)]
        spread[burstiness] = statistics.pstdev(gaps) / statistics.fmean(gaps)
    # The variation of a gamma distribution is one over the root of its shape.
    for burstiness, value in spread.items():
        assert value == pytest.approx(burstiness**-0.5, rel=0.15)
    assert set(arrivals(Options(), requests)) == {0.0}
    assert arrivals(Options(request_rate=1), [LoadRequest("a", 1, arrival=2.5)]) == [2.5]


@pytest.mark.parametrize("closes", [1, 2])
def test_a_request_on_a_closed_connection_is_sent_once_more(closes: int) -> None:
    """A server may close a connection between two requests; one that closes new connections too does not answer."""
    left, body = closes, b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        answered = 0
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
            # The second request of the first connection, and maybe the first of the next one.
            if left and (answered or left < closes):
                left -= 1
                break
            answered += 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async def load() -> list[Outcome]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            requests = [LoadRequest([5], 1)] * 3
            return (await LoadClient(address).run(requests, [0.0] * 3, 1))[0]

    outcomes = asyncio.run(asyncio.wait_for(load(), 20))
    assert [each.ok for each in outcomes] == [closes == 1, True, True]
    assert closes == 1 or "disconnected" in outcomes[0].error


def test_random_requests_repeat_by_seed() -> None:
    load = Options(num_prompts=50, random_range_ratio=0.5, random_prefix_len=7)
    first, second = random_requests(load), random_requests(load)
    assert first == second != random_requests(Options(num_prompts=50, random_range_ratio=0.5, seed=1))
    assert len({tuple(each.prompt[:7]) for each in first}) == 1
    assert all(128 + 7 <= len(each.prompt) <= 384 + 7 for each in first)


def test_sums_by_hand() -> None:
    outcomes = [
        Outcome(0, True, "", 10, 5, 0.1, 0.5, [0.1] * 4),
        Outcome(0, True, "", 20, 1, 0.3, 0.3),
        Outcome(0, False, "status 503: full"),
    ]
    found = summarise(outcomes, 2.0, goodput={"ttft": 200, "tpot": 150}, percentiles=[50, 99])
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 6)
    assert found["request_throughput"] == 1.0 and found["request_goodput"] == 0.5
    assert found["output_throughput"] == 3.0 and found["total_token_throughput"] == 18.0
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["median_tpot_ms"] == pytest.approx(100)
    assert found["p99_e2el_ms"] == pytest.approx(498) and found["mean_itl_ms"] == pytest.approx(100)
    assert found["errors"] == ["status 503: full"]


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:x", "itl:5", "bogus:5"])
def test_goodput_is_checked(pair: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        Options(goodput=(pair,))


def test_against_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    from tests.server.running import running

    from winnow import LLM

    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.0000000,20,4\n2023-11-16 18:15:46.2000000,30,5\n"
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once upon", "max_tokens": 3}\n{"prompt": [200, 201]}\n')
    with LLM(kv_memory="16MiB", max_num_seqs=8) as llm, running(llm, {"a": "key-a"}) as server:

        def bench(*arguments: str) -> dict[str, Any]:
            out = tmp_path / "out.json"
            command = [
                "bench",
                "serve",
                "--base-url",
                server.address,
                "--json",
                str(out),
                "--api-key",
                "key-a",
            ]
            assert main([*command, *arguments]) == 0, capsys.readouterr().out
            found: dict[str, Any] = json.loads(out.read_text())
            return found

        found = bench(
            *("--num-prompts", "12", "--random-input-len", "20", "--random-output-len", "6"),
            *("--request-rate", "40", "--max-concurrency", "4", "--goodput", "ttft:60000"),
        )
        assert found["completed"] == 12 and found["total_output_tokens"] == 72
        assert found["total_input_tokens"] == 240 and found["max_concurrent_requests"] <= 4
        assert found["request_goodput"] == found["request_throughput"] > 0
        found = bench("--trace", str(trace))
        assert (found["total_input_tokens"], found["total_output_tokens"]) == (50, 9)
        found = bench("--dataset", str(prompts), "--random-output-len", "4", "--save-detailed")
        assert found["output_lens"] == [3, 4]
        chat = bench("--endpoint", "/v1/chat/completions", "--dataset", str(prompts), "--num-prompts", "1")
        assert chat["completed"] == 1
        assert main(["bench", "serve", "--base-url", server.address]) == 2  # no key
