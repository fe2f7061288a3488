"""Load on a server of the OpenAI API, and what its clients saw. Names and sums of results follow vLLM's bench.

Times are the client's: a request begins when it is sent. TTFT is the time to its first token, ITL the time between two
pieces of its text, TPOT the mean time per token after the first, E2EL the time to its end.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from winnow.config import optional_int
from winnow.errors import ConfigError, WinnowError
from winnow.values.checks import check_integer, check_number

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
METRICS = ("ttft", "tpot", "itl", "e2el")


def option(default: Any, help: str, **extra: Any) -> Any:
    """Return a field that documents itself."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True)
class ServeLoad:
    """Requests that are sent, and their times."""

    num_prompts: int = option(100, "requests")
    request_rate: float | None = option(
        None, "requests per second that arrive on average; left out: all at once", parse=float
    )
    burstiness: float = option(
        1.0, "1: arrivals are a Poisson process; below 1: they come in bursts; above: more evenly"
    )
    max_concurrency: int | None = option(
        None, "most requests in progress; the others wait at the client", parse=optional_int
    )
    random_input_len: int = option(
        256, "tokens of a prompt, where no trace or dataset is given", aliases=("input_len",)
    )
    random_output_len: int = option(
        64, "tokens of an answer, where no trace or dataset is given", aliases=("output_len",)
    )
    random_range_ratio: float = option(
        0.0, "lengths vary evenly between 1 - this and 1 + this times the lengths above"
    )
    random_prefix_len: int = option(0, "tokens at the front that all random prompts share")
    vocab_size: int = option(1000, "random token ids are below this, and above 99")
    seed: int = option(0, "of prompts, lengths and arrivals")
    temperature: float = option(0.0, "of every request")
    ignore_eos: bool = option(True, "let every answer have its full length")
    ready_check_timeout: float = option(60.0, "seconds to wait for the server's first answer")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "random_input_len", "random_output_len"):
            check_integer(name, getattr(self, name), 1)
        check_integer("random_prefix_len", self.random_prefix_len, 0)
        check_integer("vocab_size", self.vocab_size, 101)
        if self.request_rate is not None and self.request_rate != float("inf"):
            check_number("request_rate", self.request_rate, 1e-6)
        check_number("burstiness", self.burstiness, 1e-3)
        check_number("random_range_ratio", self.random_range_ratio, 0, 1)
        if self.max_concurrency is not None:
            check_integer("max_concurrency", self.max_concurrency, 1)


@dataclass(frozen=True)
class LoadRequest:
    """One request.

    Attributes:
        prompt: text, token ids or messages.
        prompt_tokens: as far as it is known beforehand; the server's own count replaces it.
        arrival: seconds after the first, from a trace; None: the rate decides.
        more: fields of the request beside the usual ones.
    """

    prompt: str | list[int] | list[dict[str, str]]
    output_tokens: int
    prompt_tokens: int = 0
    arrival: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """Outcome of one request, as its client saw it."""

    started: float
    ok: bool = False
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    answered: bool = False  # the server has begun to
    text: str = ""
    cached_tokens: int | None = None
    """Tokens of the prompt that the server says it did not compute; None: it does not say."""

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None: there is one at most."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def random_requests(load: ServeLoad) -> list[LoadRequest]:
    """Return requests of random tokens; equal for equal seeds."""
    generator = random.Random(load.seed)
    prefix = [generator.randrange(100, load.vocab_size) for _ in range(load.random_prefix_len)]

    def length(mean: int) -> int:
        spread = load.random_range_ratio
        return max(1, round(mean * generator.uniform(1 - spread, 1 + spread)))

    found = []
    for _ in range(load.num_prompts):
        own = [generator.randrange(100, load.vocab_size) for _ in range(length(load.random_input_len))]
        prompt = prefix + own
        found.append(LoadRequest(prompt, length(load.random_output_len), len(prompt)))
    return found


def arrivals(load: ServeLoad, requests: Sequence[LoadRequest]) -> list[float]:
    """Return seconds after the start at which each request is sent.

    Gaps are drawn from a gamma distribution of shape `burstiness`, then stretched so that the last request leaves when
    the rate says it should.
    """
    if requests and requests[0].arrival is not None:
        return [each.arrival or 0.0 for each in requests]
    if load.request_rate is None or load.request_rate == float("inf"):
        return [0.0] * len(requests)
    generator = random.Random(f"arrivals {load.seed}")
    gaps = [
        generator.gammavariate(load.burstiness, 1 / (load.request_rate * load.burstiness)) for _ in requests
    ]
    total = sum(gaps)
    stretch = len(requests) / load.request_rate / total if total else 1.0
    found, now = [], 0.0
    for gap in gaps:
        now += gap * stretch
        found.append(now)
    return found


class LoadClient:
    """Client that sends requests to a server.

    Args:
        url: of the server, without the endpoint's path.
        model: None: whatever is served there.
    """

    def __init__(
        self, url: str, endpoint: str, model: str | None, load: ServeLoad, headers: Mapping[str, str]
    ) -> None:
        self._url = url.rstrip("/")
        self._endpoint = endpoint
        self._model = model
        self._load = load
        self._headers = dict(headers)
        self.in_progress = self.most_in_progress = 0

    async def run(self, requests: Sequence[LoadRequest]) -> tuple[list[Outcome], float]:
        """Send all requests, each at its time. Returns what came of them, and the seconds that it took.

        Raises:
            WinnowError: the server does not answer at all.
        """
        async with self.connect(requests[0]) as client:
            room = asyncio.Semaphore(self._load.max_concurrency or len(requests))
            start = time.perf_counter()

            async def send(request: LoadRequest, arrival: float) -> Outcome:
                await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
                async with room:
                    return await self.send(client, request)

            times = arrivals(self._load, requests)
            tasks = [send(each, arrival) for each, arrival in zip(requests, times, strict=True)]
            outcomes = list(await asyncio.gather(*tasks))
            return outcomes, time.perf_counter() - start

    @asynccontextmanager
    async def connect(self, first: LoadRequest) -> AsyncIterator[httpx.AsyncClient]:
        """Return connections to the server, once it answers the first request's prompt.

        Raises:
            WinnowError: it does not.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=None, headers=self._headers) as client:  # noqa: S113
            await self._wait_ready(client, first)
            yield client

    async def _wait_ready(self, client: httpx.AsyncClient, request: LoadRequest) -> None:
        deadline = time.perf_counter() + self._load.ready_check_timeout
        while True:
            first = await self.send(client, LoadRequest(request.prompt, 1))
            if first.ok:
                break
            if time.perf_counter() > deadline or first.error.startswith("status 4"):
                raise WinnowError(f"{self._url} does not answer: {first.error}")
            await asyncio.sleep(1)
        self.most_in_progress = 0

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.output_tokens,
            "temperature": self._load.temperature,
        }
        if self._model is not None:
            body["model"] = self._model
        if self._load.ignore_eos:
            body["ignore_eos"] = True
        body |= request.more
        if self._endpoint == ENDPOINTS[0]:
            return body | {"prompt": request.prompt}
        if isinstance(request.prompt, str):
            return body | {"messages": [{"role": "user", "content": request.prompt}]}
        return body | {"messages": request.prompt}

    async def send(self, client: httpx.AsyncClient, request: LoadRequest) -> Outcome:
        """Send a request, and return what came of it."""
        outcome = Outcome(time.perf_counter())
        self.in_progress += 1
        self.most_in_progress = max(self.most_in_progress, self.in_progress)
        try:
            try:
                await self._exchange(client, request, outcome)
            except httpx.RemoteProtocolError:
                if outcome.answered:
                    raise
                # The server closed a connection, which it may between two requests, as the second was under way.
                await self._exchange(client, request, outcome)
        except (httpx.HTTPError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        finally:
            self.in_progress -= 1
        return outcome

    async def _exchange(self, client: httpx.AsyncClient, request: LoadRequest, outcome: Outcome) -> None:
        async with client.stream("POST", self._url + self._endpoint, json=self._body(request)) as response:
            outcome.answered = True
            if response.status_code == 200:
                await self._read(response, outcome)
            else:
                text = (await response.aread()).decode(errors="replace")
                outcome.error = f"status {response.status_code}: {text[:300]}"

    async def _read(self, response: httpx.Response, outcome: Outcome) -> None:
        last, seen = outcome.started, False
        async for chunk in _chunks(response):
            now = time.perf_counter()
            if "error" in chunk:
                outcome.error = str(chunk["error"].get("message", chunk["error"]))
                return
            usage = chunk.get("usage")
            if usage:
                outcome.prompt_tokens = usage["prompt_tokens"]
                outcome.output_tokens = usage["completion_tokens"]
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            choices = chunk.get("choices")
            if not choices:
                continue
            text = choices[0].get("text") or (choices[0].get("delta") or {}).get("content")
            if not text:
                continue
            outcome.text += text
            if seen:
                outcome.itl.append(now - last)
            else:
                outcome.ttft = now - outcome.started
            last, seen = now, True
        outcome.latency = time.perf_counter() - outcome.started if not seen else last - outcome.started
        outcome.ok = not outcome.error
        if not seen:
            outcome.ttft = outcome.latency  # an answer without text


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    rest = b""
    # Bytes, not lines of text: what the client computes is taken from the server where both share a machine.
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line.rstrip() != b"data: [DONE]":
                yield json.loads(line[6:])


def read_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Return limits such as "ttft:500", in milliseconds.

    Raises:
        ConfigError: a pair is no limit.
    """
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in METRICS or name == "itl" or not value.replace(".", "", 1).isdigit():
            raise ConfigError(
                f"goodput must hold limits such as ttft:500, tpot:50 or e2el:5000, got {pair!r}"
            )
        limits[name] = float(value)
    return limits


def summarise(
    outcomes: Sequence[Outcome],
    seconds: float,
    *,
    goodput: Mapping[str, float],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Return results under vLLM's names; times in milliseconds."""
    done = [each for each in outcomes if each.ok]
    prompt, output = sum(e.prompt_tokens for e in done), sum(e.output_tokens for e in done)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(_is_good(each, goodput) for each in done) / seconds if goodput else None,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
    }
    values = {
        "ttft": [each.ttft for each in done],
        "tpot": [each.tpot for each in done if each.tpot is not None],
        "itl": [gap for each in done for gap in each.itl],
        "e2el": [each.latency for each in done],
    }
    for name, own in values.items():
        milliseconds = sorted(1000 * value for value in own)
        found[f"mean_{name}_ms"] = statistics.fmean(milliseconds) if own else 0.0
        found[f"median_{name}_ms"] = statistics.median(milliseconds) if own else 0.0
        found[f"std_{name}_ms"] = statistics.pstdev(milliseconds) if own else 0.0
        for percentile in percentiles:
            found[f"p{percentile:g}_{name}_ms"] = percentile_of(milliseconds, percentile)
    found["errors"] = sorted({each.error for each in outcomes if each.error})[:10]
    return found


def _is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    seen = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(1000 * seen[name] <= limit for name, limit in limits.items())


def percentile_of(ordered: Sequence[float], percentile: float) -> float:
    """Interpolate linearly between neighbours, as numpy's."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percentile / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
