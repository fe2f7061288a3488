"""What serving costs beside the offline engine, and whether a crowd leaves anything behind.

python -m winnow_lab.service.serving overhead         the same requests by `LLM` and through HTTP, in turn
python -m winnow_lab.service.serving cost             processor time of the event loop and of the client, per token
python -m winnow_lab.service.serving queue            half as much again as it can serve, with a bound and without
python -m winnow_lab.service.serving soak [--streams 200] [--minutes 10]   slow readers and clients that leave

One process holds both the engine and the clients of `soak`; the others load from a process of their own.
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from winnow import LLM, SamplingParams
from winnow.server.config import ServerConfig
from winnow.server.keys import Keys
from winnow.server.server import Server
from winnow.server.service import Service, model_names
from winnow_lab.bench.serve import ServeLoad, random_requests
from winnow_lab.report.tables import TextTable
from winnow_lab.study import ModelOptions, Result, flag, run_study


@dataclass(frozen=True)
class Options(ModelOptions):
    """What is measured, and the load."""

    what: str = flag(positional=True, choices=("overhead", "cost", "queue", "soak"))
    streams: int = flag(200, "of soak", least=1)
    minutes: float = flag(10.0, "of soak")
    requests: int = flag(64, least=1)
    input: int = flag(128, "tokens of a prompt", least=1)
    new_tokens: int = flag(64, "of an answer", least=1)
    repeat: int = flag(3, least=1)
    max_num_seqs: int = flag(32, least=1)


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


def overhead(llm: LLM, options: Options) -> Result:
    """Tokens per second offline and served, in turn, and how long a token waits in each."""
    load = ServeLoad(
        num_prompts=options.requests, random_input_len=options.input, random_output_len=options.new_tokens
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
        for _ in range(options.repeat):
            took, step = offline(llm, prompts, params)
            rates["offline"].append(tokens / took)
            waits["offline"].append(1000 * step)
            found = bench(server.address, options)
            rates["served"].append(found["output_throughput"])
            waits["served"].append(found["median_itl_ms"])
    finally:
        server.stop()
    rows = tuple(
        (name, (f"{statistics.median(each):.1f}", f"{statistics.median(waits[name]):.2f}"))
        for name, each in rates.items()
    )
    columns = ("tokens/s", "ms a token waits (served: ITL; offline: step)")
    ratio = statistics.median(rates["served"]) / statistics.median(rates["offline"])
    numbers = {"rates": rates, "waits_ms": waits, "served_over_offline": ratio}
    title = f"Medians; served / offline {ratio:.3f}"
    return Result("What serving costs", [TextTable(title, "", columns, rows)], numbers=numbers)


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
    return now - began, statistics.median(steps)


def bench(address: str, options: Options, *extra: str) -> dict[str, Any]:
    """Results of `winnow bench serve` against a server."""
    command = [sys.executable, "-m", "winnow", "bench", "serve", "--base-url", address]
    command += ["--num-prompts", str(options.requests), "--random-input-len", str(options.input)]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command += ["--random-output-len", str(options.new_tokens), "--json", str(results), *extra]
        # Its exit code says whether requests failed, which some do where the queue is bounded.
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if not results.exists():
            raise RuntimeError(f"{' '.join(command)} wrote no results: {done.stderr or done.stdout}")
        found: dict[str, Any] = json.loads(results.read_text())
    return found


def cost(llm: LLM, options: Options) -> Result:
    """Processor time, which other work on the machine changes little: of long answers less that of short ones."""
    lengths = (8, 264)
    server = Background(llm, max_num_queued_reqs=None)
    used: list[tuple[float, float]] = []
    try:
        for length in (lengths[0], *lengths):  # the first warms up
            before, children = server.loop_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
            bench(server.address, options, "--random-output-len", str(length))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            client = after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
            used.append((server.loop_time() - before, client))
    finally:
        server.stop()
    tokens = options.requests * (lengths[1] - lengths[0])
    loop, client = (1e6 * (long - short) / tokens for short, long in zip(*used[1:], strict=True))
    streams = llm.config.scheduler.max_num_seqs
    facts = [
        f"Per token: event loop {loop:.0f} us, client {client:.0f} us.",
        f"A step of {streams} streams occupies the event loop for {streams * loop / 1000:.2f} ms.",
    ]
    return Result("Processor time of serving", facts=facts, numbers={"loop_us": loop, "client_us": client})


def queue(llm: LLM, options: Options) -> Result:
    """What a bound on the queue costs in throughput, and what it does for latency, under too much load."""
    bounds: dict[str, int | None] = {"none": None, "bound": llm.config.scheduler.max_num_seqs // 2}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in bounds}
    rate = 0.0
    for _ in range(options.repeat):
        for name, bound in bounds.items():
            server = Background(llm, max_num_queued_reqs=bound)
            try:
                if not rate:
                    bench(server.address, options)  # warms up
                    rate = 1.5 * bench(server.address, options)["request_throughput"]
                found[name].append(bench(server.address, options, "--request-rate", f"{rate:.3f}"))
            finally:
                server.stop()
    fields = ("output_throughput", "completed", "failed", "p99_ttft_ms", "p99_e2el_ms")
    rows = tuple(
        (name, tuple(f"{statistics.median(run[field] for run in runs):.0f}" for field in fields))
        for name, runs in found.items()
    )
    table = TextTable(f"Queues at {rate:.1f} requests/s", "bound", fields, rows)
    return Result("A bounded queue under too much load", [table], numbers={"rate": rate, "runs": found})


def soak(llm: LLM, options: Options) -> Result:
    """Let many streams come and go, and look for what is left."""
    before = llm.stats().kv_bytes_used  # its tables
    server = Background(llm, max_num_queued_reqs=None)
    try:
        firsts, counts = asyncio.run(_crowd(server.address, options))
        end = time.monotonic() + 60
        while llm.has_unfinished and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        server.stop()
    stats = llm.stats()
    left = stats.kv_bytes_used - before
    llm.check_integrity()
    firsts.sort()
    low, high = firsts[len(firsts) // 2], firsts[-len(firsts) // 100]
    facts = [
        f"{counts}, time to first token p50 {low:.3f} s, p99 {high:.3f} s",
        f"left: {stats.num_running} running, {stats.num_waiting} waiting, {left} bytes of KVs",
    ]
    ok = not (stats.num_running or stats.num_waiting or left or counts["failed"])
    return Result("A crowd of streams", facts=facts, numbers={"counts": counts, "left": left}, ok=ok)


async def _crowd(address: str, options: Options) -> tuple[list[float], dict[str, int]]:
    firsts: list[float] = []
    counts: dict[str, int] = {"read": 0, "left": 0, "failed": 0}
    end = time.monotonic() + 60 * options.minutes
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

        await asyncio.gather(*(one(number) for number in range(options.streams)))
    return firsts, counts


def study(options: Options) -> Result:
    """Measure what was asked for."""
    sizes: dict[str, Any] = {"kv_memory": "256MiB", "max_num_seqs": options.max_num_seqs}
    parts = {"overhead": overhead, "cost": cost, "queue": queue, "soak": soak}
    with LLM(options.model, enable_prefix_caching=False, threads=options.threads, **sizes) as llm:
        return parts[options.what](llm, options)


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
