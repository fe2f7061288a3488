"""Conversations of agents with a server: many turns, pauses between them, each prompt the whole of what came before."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from winnow.errors import ConfigError
from winnow.values.checks import check_integer, check_number
from winnow_lab.bench.serve import LoadClient, LoadRequest, Outcome, ServeLoad, option, percentile_of

_TOKENS_PER_WORD = 1.35
_TOOLS = ("search", "read_file", "run_tests", "list_orders", "get_weather", "query_database")
_WORDS = [
    "the",
    "result",
    "of",
    "this",
    "call",
    "shows",
    "that",
    "file",
    "line",
    "order",
    "user",
    "table",
    "error",
    "value",
    "time",
    "server",
    "client",
    "request",
    "answer",
    "model",
    "test",
    "build",
    "path",
    "name",
    "list",
    "field",
    "index",
    "count",
    "total",
    "first",
    "last",
    "next",
    "day",
    "city",
    "price",
    "stock",
    "note",
    "change",
    "open",
    "close",
    "read",
    "write",
    "find",
    "move",
    "left",
    "right",
    "new",
    "old",
    "large",
    "small",
    "before",
    "after",
    "because",
    "while",
    "between",
    "under",
    "state",
    "plan",
]


@dataclass(frozen=True)
class AgentLoad:
    """Conversations that are played, and their times."""

    num_sessions: int = option(100, "conversations")
    num_turns: int = option(20, "turns of each")
    system_tokens: int = option(400, "tokens of instructions that all conversations begin with, about")
    prompt_min: int = option(500, "fewest new tokens of a turn, about")
    prompt_max: int = option(1500, "most new tokens of a turn, about")
    answer_min: int = option(50, "fewest tokens of an answer")
    answer_max: int = option(300, "most tokens of an answer")
    think_mean: float = option(5.0, "seconds between an answer and the next turn, exponential, on average")
    ramp: float = option(10.0, "seconds over which conversations begin")
    max_concurrency: int | None = option(
        None, "most requests in progress; left out: as many as there are", parse=int
    )
    session_field: str | None = option(
        None, "field of requests that names the conversation, such as prompt_cache_key; left out: none"
    )
    seed: int = option(0, "of texts, lengths and pauses")
    ready_check_timeout: float = option(120.0, "seconds to wait for the server's first answer")

    def __post_init__(self) -> None:
        for name in ("num_sessions", "num_turns", "prompt_min", "answer_min"):
            check_integer(name, getattr(self, name), 1)
        check_integer("system_tokens", self.system_tokens, 0)
        for name in ("think_mean", "ramp"):
            check_number(name, getattr(self, name), 0)
        for what in ("prompt", "answer"):
            least, most = getattr(self, f"{what}_min"), getattr(self, f"{what}_max")
            if most < least:
                raise ConfigError(f"{what}_max must be at least {what}_min, {least}, got {most}")

    def as_serve_load(self) -> ServeLoad:
        """Return how each request is sent."""
        return ServeLoad(
            num_prompts=self.num_sessions, ready_check_timeout=self.ready_check_timeout, seed=self.seed
        )


@dataclass(frozen=True)
class AgentTurn:
    """A turn: what a tool or user says, tokens of the answer, and seconds before it."""

    text: str
    answer_tokens: int
    pause: float


@dataclass
class Played:
    """A turn as it went.

    Attributes:
        messages: that were sent.
        new_tokens: of the prompt, those that are neither of the turn before nor of its answer.
    """

    session: int
    turn: int
    messages: list[dict[str, str]]
    answer_tokens: int
    outcome: Outcome
    new_tokens: int = 0

    @property
    def computed_tokens(self) -> int | None:
        """Tokens of the prompt that were computed; None: the server does not say."""
        cached = self.outcome.cached_tokens
        return None if cached is None else self.outcome.prompt_tokens - cached


@dataclass
class _Words:
    """Text of random words, or passages of a text."""

    generator: random.Random
    passages: Sequence[str] = ()

    def text(self, tokens: int) -> str:
        """Return about as many tokens of text."""
        count = max(round(tokens / _TOKENS_PER_WORD), 1)
        if not self.passages:
            return " ".join(self.generator.choices(_WORDS, k=count))
        start = self.generator.randrange(max(len(self.passages) - count, 1))
        return " ".join(self.passages[start : start + count])


def agent_sessions(load: AgentLoad, text: str = "") -> tuple[str, list[list[AgentTurn]]]:
    """Return the instructions that all begin with, and the turns of each conversation; equal for equal seeds.

    Args:
        text: of which turns are passages; empty: they are random words.
    """
    words = _Words(random.Random(load.seed), text.split())
    generator = words.generator
    system = f"You are an agent with tools: {', '.join(_TOOLS)}. {words.text(load.system_tokens)}"
    sessions = []
    for number in range(load.num_sessions):
        turns = []
        for turn in range(load.num_turns):
            tokens = generator.randint(load.prompt_min, load.prompt_max)
            says = f"Result {turn} of {generator.choice(_TOOLS)} for task {number}: {words.text(tokens)}"
            start = number * load.ramp / load.num_sessions
            pause = generator.expovariate(1 / load.think_mean) if load.think_mean else 0.0
            turns.append(
                AgentTurn(says, generator.randint(load.answer_min, load.answer_max), pause if turn else start)
            )
        sessions.append(turns)
    return system, sessions


class AgentPlayer:
    """Player of conversations against a server."""

    def __init__(self, url: str, model: str | None, load: AgentLoad, headers: Mapping[str, str]) -> None:
        self._client = LoadClient(url, "/v1/chat/completions", model, load.as_serve_load(), headers)
        self._load = load

    async def play(self, system: str, sessions: Sequence[Sequence[AgentTurn]]) -> tuple[list[Played], float]:
        """Play all conversations at once. Returns their turns, and the seconds that it took.

        Raises:
            WinnowError: the server does not answer at all.
        """
        first = LoadRequest([{"role": "user", "content": "Are you there?"}], 1)
        async with self._client.connect(first) as connection:
            room = asyncio.Semaphore(self._load.max_concurrency or len(sessions))
            start = time.perf_counter()
            tasks = (
                self._converse(connection, room, number, system, turns)
                for number, turns in enumerate(sessions)
            )
            played = [each for turns in await asyncio.gather(*tasks) for each in turns]
            return played, time.perf_counter() - start

    async def answer_again(self, turns: Sequence[Played]) -> list[str]:
        """Return what the server answers to turns that were played, one after the other."""
        found = []
        async with self._client.connect(LoadRequest(turns[0].messages, 1)) as connection:
            for each in turns:
                outcome = await self._client.send(connection, LoadRequest(each.messages, each.answer_tokens))
                found.append(outcome.text)
        return found

    async def _converse(
        self,
        connection: httpx.AsyncClient,
        room: asyncio.Semaphore,
        number: int,
        system: str,
        turns: Sequence[AgentTurn],
    ) -> list[Played]:
        played: list[Played] = []
        messages = [{"role": "system", "content": system}]
        name = self._load.session_field
        more = {} if name is None else {name: f"agent-{self._load.seed}-{number}"}
        known = 0
        for index, turn in enumerate(turns):
            await asyncio.sleep(turn.pause)
            messages = [*messages, {"role": "user", "content": turn.text}]
            async with room:
                request = LoadRequest(messages, turn.answer_tokens, more=more)
                outcome = await self._client.send(connection, request)
            new = outcome.prompt_tokens - known
            played.append(Played(number, index, messages, turn.answer_tokens, outcome, new))
            if not outcome.ok:
                break
            known = outcome.prompt_tokens + outcome.output_tokens
            messages = [*messages, {"role": "assistant", "content": outcome.text}]
        return played


def summarise_agents(played: Sequence[Played], seconds: float) -> dict[str, Any]:
    """Return times to the first token, and tokens computed against new ones; times in seconds."""
    done = [each for each in played if each.outcome.ok]
    later = [each for each in done if each.turn]
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(played) - len(done),
        "errors": sorted({each.outcome.error for each in played if each.outcome.error})[:10],
    }
    for name, turns in (("ttft", done), ("later_ttft", later)):
        times = sorted(each.outcome.ttft for each in turns)
        for percentile in (50, 90):
            found[f"{name}_p{percentile}"] = percentile_of(times, percentile)
    prompt, new = sum(each.outcome.prompt_tokens for each in done), sum(each.new_tokens for each in done)
    computed = [each.computed_tokens for each in done]
    found |= {"prompt_tokens": prompt, "new_tokens": new, "computed_tokens": None, "hit_rate": None}
    if None not in computed:
        total = sum(each for each in computed if each is not None)
        found |= {"computed_tokens": total, "hit_rate": 1 - total / prompt if prompt else 0.0}
    output = sum(each.outcome.output_tokens for each in done)
    return found | {"output_tokens": output, "output_throughput": output / seconds}


def spread_over(played: Sequence[Played], count: int) -> list[Played]:
    """Return `count` of the turns that were answered, evenly over all of them."""
    done = [each for each in played if each.outcome.ok]
    count = min(count, len(done))
    return [done[number * len(done) // count] for number in range(count)]
