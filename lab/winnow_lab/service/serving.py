"""What serving costs beside the offline engine, and whether a crowd leaves anything behind.

python -m winnow_lab.service.serving overhead         the same requests by `LLM` and through HTTP, in turn
python -m winnow_lab.service.serving cost             processor time of the event loop and of the client, per token
python -m winnow_lab.service.serving queue            half as much again as it can serve, with a bound and without
python -m winnow_lab.service.serving soak [--streams 200] [--minutes 10]   slow readers and clients that leave

One process holds both the engine and the clients of `soak`; the others load from a process of their own.
"""

import argparse
import asyncio
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from winnow import LLM, SamplingParams
from winnow.server.config import ServerConfig
from winnow.server.keys import Keys
from winnow.server.server import Server
from winnow.server.service import Service, model_names
from winnow_lab.bench.serve import ServeLoad, random_requests


class Background:
    """A server in a thread of this process."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self._ready = threading.Event()
        self.address = ""

        def run() -> None:
            config = ServerConfig(port=0, log_level="warning", **options)
            self.service = Service(llm, config, Keys({}), model_names(llm.config.model.model, ()))
            self._server = Server(self.service, self._started)
            self._server.run()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self._ready.wait()

    def _started(self, address: str) -> None:
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._ready.set()

    def loop_time(self) -> float:
        """Seconds of processor time that the event loop's thread has used."""

        async def read() -> float:
            return time.thread_time()

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result()

    def stop(self) -> None:
        """End it."""
        self._server.should_exit = True
        self._thread.join()


def overhead(llm: LLM, arguments: argparse.Namespace) -> int:
    """Tokens per second offline and served, in turn, and how long a token waits in each."""
    load = ServeLoad(
        num_prompts=arguments.requests, random_input_len=arguments.input, random_output_len=arguments.output
    )
    requests = random_requests(load)
    prompts: list[Any] = [each.prompt for each in requests]
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=each.output_tokens) for each in requests
    ]
    tokens = sum(each.output_tokens for each in requests)
    server = Background(llm, max_num_queued_reqs=None)
    rates: dict[str, list[float]] = {"offline": [], "served": []}
    waits: dict[str, list[float]] = {"offline": [], "served": []}
    try:
        for _ in range(arguments.repeat):
            took, step = offline(llm, prompts, params)
            rates["offline"].append(tokens / took)
            waits["offline"].append(1000 * step)
            found = bench(server.address, arguments)
            rates["served"].append(found["output_throughput"])
            waits["served"].append(found["median_itl_ms"])
    finally:
        server.stop()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(f"{name:8} {medians[name]:8.1f} tokens/s  ({', '.join(f'{value:.1f}' for value in values)})")
    step, gap = (statistics.median(waits[name]) for name in ("offline", "served"))
    print(
        f"served / offline {medians['served'] / medians['offline']:.3f}; "
        f"a token's wait {gap:.2f} ms served (median ITL), {step:.2f} ms offline (median step)"
    )
    return 0


def offline(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> tuple[float, float]:
    """Seconds of all requests without a server, and the median of a step of them."""
    began = time.perf_counter()
    for prompt, each in zip(prompts, params, strict=True):
        llm.submit(prompt, each)
    steps, before = [], time.perf_counter()
    while llm.has_unfinished:
        llm.step()
        now = time.perf_counter()
        steps.append(now - before)
        before = now
    llm.rest()  # else the server would compute beside a second team of threads
    return now - began, statistics.median(steps)


def bench(address: str, arguments: argparse.Namespace, *extra: str) -> dict[str, Any]:
    """Results of `winnow bench serve` against a server."""
    command = [sys.executable, "-m", "winnow", "bench", "serve", "--base-url", address]
    command += ["--num-prompts", str(arguments.requests), "--random-input-len", str(arguments.input)]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command += ["--random-output-len", str(arguments.output), "--json", str(results), *extra]
        # Its exit code says whether requests failed, which some do where the queue is bounded.
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if not results.exists():
            raise RuntimeError(f"{' '.join(command)} wrote no results: {done.stderr or done.stdout}")
        found: dict[str, Any] = json.loads(results.read_text())
    return found


def cost(llm: LLM, arguments: argparse.Namespace) -> int:
    """Processor time, which other work on the machine changes little: of long answers less that of short ones."""
    lengths = (8, 264)
    server = Background(llm, max_num_queued_reqs=None)
    used: list[tuple[float, float]] = []
    try:
        for length in (lengths[0], *lengths):  # the first warms up
            before, children = server.loop_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
            bench(server.address, arguments, "--random-output-len", str(length))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            client = after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
            used.append((server.loop_time() - before, client))
    finally:
        server.stop()
    tokens = arguments.requests * (lengths[1] - lengths[0])
    loop, client = (1e6 * (long - short) / tokens for short, long in zip(*used[1:], strict=True))
    streams = llm.config.scheduler.max_num_seqs
    print(f"per token: event loop {loop:.0f} us, client {client:.0f} us")
    print(f"a step of {streams} streams occupies the event loop for {streams * loop / 1000:.2f} ms")
    return 0


def queue(llm: LLM, arguments: argparse.Namespace) -> int:
    """What a bound on the queue costs in throughput, and what it does for latency, under too much load."""
    bounds: dict[str, int | None] = {"none": None, "bound": llm.config.scheduler.max_num_seqs // 2}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in bounds}
    rate = 0.0
    for _ in range(arguments.repeat):
        for name, bound in bounds.items():
            server = Background(llm, max_num_queued_reqs=bound)
            try:
                if not rate:
                    bench(server.address, arguments)  # warms up
                    rate = 1.5 * bench(server.address, arguments)["request_throughput"]
                found[name].append(bench(server.address, arguments, "--request-rate", f"{rate:.3f}"))
            finally:
                server.stop()
    for name, runs in found.items():
        print(f"{name:6} at {rate:.1f} requests/s:", end="")
        for field in ("output_throughput", "completed", "failed", "p99_ttft_ms", "p99_e2el_ms"):
            print(f" {field} {statistics.median(run[field] for run in runs):.0f}", end="")
        print()
    return 0


def soak(llm: LLM, arguments: argparse.Namespace) -> int:
    """Let many streams come and go, and look for what is left."""
    before = llm.stats().kv_bytes_used  # its tables
    server = Background(llm, max_num_queued_reqs=None)
    try:
        firsts, counts = asyncio.run(_crowd(server.address, arguments))
        end = time.monotonic() + 60
        while llm.has_unfinished and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        server.stop()
    stats = llm.stats()
    left = stats.kv_bytes_used - before
    llm.check_integrity()
    firsts.sort()
    print(
        f"{counts}, time to first token p50 {firsts[len(firsts) // 2]:.3f} s, p99 {firsts[-len(firsts) // 100]:.3f} s"
    )
    print(f"left: {stats.num_running} running, {stats.num_waiting} waiting, {left} bytes of KVs")
    return 1 if stats.num_running or stats.num_waiting or left or counts["failed"] else 0


async def _crowd(address: str, arguments: argparse.Namespace) -> tuple[list[float], dict[str, int]]:
    firsts: list[float] = []
    counts: dict[str, int] = {"read": 0, "left": 0, "failed": 0}
    end = time.monotonic() + 60 * arguments.minutes
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:

        async def one(number: int) -> None:
            generator = random.Random(number)
            while time.monotonic() < end:
                body = {
                    "prompt": [generator.randrange(100, 1000) for _ in range(generator.randrange(1, 300))],
                    "max_tokens": generator.randrange(1, 200),
                    "ignore_eos": True,
                    "stream": True,
                }
                leaves = generator.random() < 0.3
                began = time.monotonic()
                try:
                    async with client.stream("POST", "/v1/completions", json=body) as response:
                        seen = 0
                        async for line in response.aiter_lines():
                            if not line.startswith("data: {"):
                                continue
                            if "error" in json.loads(line[6:]):
                                counts["failed"] += 1
                            if not seen:
                                firsts.append(time.monotonic() - began)
                            seen += 1
                            if leaves and seen > generator.randrange(1, 50):
                                break
                            if number % 5 == 0:
                                await asyncio.sleep(0.02)  # reads slowly
                    counts["left" if leaves else "read"] += 1
                except httpx.HTTPError:
                    counts["failed"] += 1

        await asyncio.gather(*(one(number) for number in range(arguments.streams)))
    return firsts, counts


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "cost", "queue", "soak"))
    parser.add_argument("--model", help="directory or GGUF file; left out: the demo model")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    arguments = parser.parse_args()
    with LLM(
        arguments.model, kv_memory="256MiB", max_num_seqs=arguments.max_num_seqs, enable_prefix_caching=False
    ) as llm:
        return {"overhead": overhead, "cost": cost, "queue": queue, "soak": soak}[arguments.what](
            llm, arguments
        )


if __name__ == "__main__":
    sys.exit(main())
