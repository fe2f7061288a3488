"""Load on a server of the OpenAI API, and what its clients saw. Names and sums of results follow vLLM's bench.

Times are the client's: a request begins when it is sent. TTFT is the time to its first token, ITL the time between two
pieces of its text, TPOT the mean time per token after the first, E2EL the time to its end.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from winnow.errors import WinnowError
from winnow_lab.report import percentile

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class LoadRequest:
    """One request.

    Attributes:
        prompt: text, token ids or messages.
        arrival: seconds after the first, from a trace; None: the rate decides.
    """

    prompt: str | list[int] | list[dict[str, str]]
    output_tokens: int
    arrival: float | None = None


@dataclass
class Outcome:
    """Outcome of one request, as its client saw it.

    Attributes:
        cached_tokens: of the prompt, those that the server says it did not compute; None: it does not say.
    """

    started: float
    ok: bool = False
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    answered: bool = False
    text: str = ""
    cached_tokens: int | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None: there is one at most."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class LoadClient:
    """Client that sends requests to a server.

    Args:
        fields: of every request; a model that is None is whatever is served there.
        key: of the API; None: from the environment, where there is one.
        patience: seconds to wait for the first answer.
    """

    def __init__(
        self,
        url: str,
        endpoint: str = COMPLETIONS,
        fields: Mapping[str, Any] | None = None,
        key: str | None = None,
        patience: float = 60.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._endpoint = endpoint
        self._fields = {name: value for name, value in (fields or {}).items() if value is not None}
        key = key or os.environ.get("WINNOW_API_KEY") or os.environ.get("OPENAI_API_KEY")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._patience = patience
        self.in_progress = self.most_in_progress = 0

    async def run(
        self, requests: Sequence[LoadRequest], times: Sequence[float], most: int | None = None
    ) -> tuple[list[Outcome], float]:
        """Send all requests, each at its time, `most` at once. Returns their outcomes, and seconds."""
        async with self.connect(requests[0].prompt) as client:
            room = asyncio.Semaphore(most or len(requests))
            start = time.perf_counter()

            async def send(request: LoadRequest, arrival: float) -> Outcome:
                await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
                async with room:
                    return await self.send(client, request)

            tasks: list[Awaitable[Outcome]] = list(map(send, requests, times))
            outcomes = list(await asyncio.gather(*tasks))
            return outcomes, time.perf_counter() - start

    @asynccontextmanager
    async def connect(self, prompt: Any) -> AsyncIterator[httpx.AsyncClient]:
        """Open connections to the server, once it answers a prompt; raises WinnowError where it does not."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=None, headers=self._headers) as client:  # noqa: S113
            deadline = time.perf_counter() + self._patience
            while not (first := await self.send(client, LoadRequest(prompt, 1))).ok:
                if time.perf_counter() > deadline or first.error.startswith("status 4"):
                    raise WinnowError(f"{self._url} does not answer: {first.error}")
                await asyncio.sleep(1)
            self.most_in_progress = 0
            yield client

    async def send(self, client: httpx.AsyncClient, request: LoadRequest) -> Outcome:
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

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        body = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.output_tokens,
        }
        body |= self._fields
        if self._endpoint == COMPLETIONS:
            return body | {"prompt": request.prompt}
        if isinstance(request.prompt, str):
            return body | {"messages": [{"role": "user", "content": request.prompt}]}
        return body | {"messages": request.prompt}

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
            choice = (chunk.get("choices") or [{}])[0]
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if not text:
                continue
            outcome.text += text
            if seen:
                outcome.itl.append(now - last)
            else:
                outcome.ttft = now - outcome.started
            last, seen = now, True
        outcome.latency = (last if seen else time.perf_counter()) - outcome.started
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


def summarise(
    outcomes: Sequence[Outcome], seconds: float, *, goodput: Mapping[str, float], percentiles: Sequence[float]
) -> dict[str, Any]:
    """Results under vLLM's names; times in milliseconds."""
    done = [each for each in outcomes if each.ok]
    prompt, output = sum(e.prompt_tokens for e in done), sum(e.output_tokens for e in done)

    def is_good(outcome: Outcome) -> bool:
        seen = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
        return all(1000 * seen[name] <= limit for name, limit in goodput.items())

    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(map(is_good, done)) / seconds if goodput else None,
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
        milliseconds = [1000 * value for value in own] or [0.0]
        found[f"mean_{name}_ms"] = statistics.fmean(milliseconds)
        found[f"median_{name}_ms"] = statistics.median(milliseconds)
        found[f"std_{name}_ms"] = statistics.pstdev(milliseconds)
        for percent in percentiles:
            found[f"p{percent:g}_{name}_ms"] = percentile(milliseconds, percent)
    return found | {"errors": errors_of(outcomes)}


def errors_of(outcomes: Sequence[Outcome]) -> list[str]:
    """The first ten messages of failures, each once."""
    return sorted({each.error for each in outcomes if each.error})[:10]
