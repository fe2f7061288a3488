"""Conversations of agents with a server: many turns, pauses between them, each prompt the whole of what came before."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from winnow.errors import ConfigError
from winnow_lab.bench.serve import LoadClient, LoadRequest, Outcome, errors_of
from winnow_lab.report import percentile
from winnow_lab.study import flag
from winnow_lab.study.options import Flags

_TOKENS_PER_WORD = 1.35
_TOOLS = ("search", "read_file", "run_tests", "list_orders", "get_weather", "query_database")
_WORDS = """the result of this call shows that file line order user table error value time server client request answer
    model test build path name list field index count total first last next day city price stock note change open close
    read write find move left right new old large small before after because while between under state plan"""


@dataclass(frozen=True)
class AgentLoad(Flags):
    num_sessions: int = flag(100, "conversations", least=1)
    num_turns: int = flag(20, "turns of each", least=1)
    system_tokens: int = flag(400, "of instructions that all conversations begin with, about", least=0)
    prompt_min: int = flag(500, "fewest new tokens of a turn, about", least=1)
    prompt_max: int = flag(1500, "most new tokens of a turn, about")
    answer_min: int = flag(50, "fewest tokens of an answer", least=1)
    answer_max: int = flag(300, "most tokens of an answer")
    think_mean: float = flag(5.0, "seconds before the next turn, exponential, on average", least=0)
    ramp: float = flag(10.0, "seconds over which conversations begin", least=0)
    max_concurrency: int | None = flag(None, "most requests in progress (default: all)", least=1)
    seed: int = flag(0, "of texts, lengths and pauses")
    ready_check_timeout: float = flag(120.0, "seconds to wait for the server's first answer")

    def __post_init__(self) -> None:
        super().__post_init__()
        for what in ("prompt", "answer"):
            least, most = getattr(self, f"{what}_min"), getattr(self, f"{what}_max")
            if most < least:
                raise ConfigError(f"{what}_max must be at least {what}_min, {least}, got {most}")


@dataclass(frozen=True)
class AgentTurn:
    """A turn: what a tool or user says, tokens of the answer, and seconds before it."""

    text: str
    answer_tokens: int
    pause: float


@dataclass
class Played:
    """A turn as it went; `new_tokens` of its prompt are neither of the turn before nor of its answer."""

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


def agent_sessions(load: AgentLoad) -> tuple[str, list[list[AgentTurn]]]:
    """The instructions that all begin with, and the turns of each conversation; equal for equal seeds."""
    generator = random.Random(load.seed)

    def words(tokens: int) -> str:
        return " ".join(generator.choices(_WORDS.split(), k=max(round(tokens / _TOKENS_PER_WORD), 1)))

    def turn(session: int, number: int) -> AgentTurn:
        tokens = generator.randint(load.prompt_min, load.prompt_max)
        says = f"Result {number} of {generator.choice(_TOOLS)} for task {session}: {words(tokens)}"
        pause = generator.expovariate(1 / load.think_mean) if load.think_mean else 0.0
        if not number:
            pause = session * load.ramp / load.num_sessions
        return AgentTurn(says, generator.randint(load.answer_min, load.answer_max), pause)

    system = f"You are an agent with tools: {', '.join(_TOOLS)}. {words(load.system_tokens)}"
    sessions, turns = range(load.num_sessions), range(load.num_turns)
    return system, [[turn(session, number) for number in turns] for session in sessions]


async def play(
    client: LoadClient, load: AgentLoad, system: str, sessions: Sequence[Sequence[AgentTurn]]
) -> tuple[list[Played], float]:
    """Play all conversations at once. Returns their turns, and the seconds that it took."""
    async with client.connect([{"role": "user", "content": "Are you there?"}]) as connection:
        room = asyncio.Semaphore(load.max_concurrency or len(sessions))

        async def converse(number: int, turns: Sequence[AgentTurn]) -> list[Played]:
            played: list[Played] = []
            messages = [{"role": "system", "content": system}]
            known = 0
            for index, turn in enumerate(turns):
                await asyncio.sleep(turn.pause)
                messages = [*messages, {"role": "user", "content": turn.text}]
                async with room:
                    outcome = await client.send(connection, LoadRequest(messages, turn.answer_tokens))
                new = outcome.prompt_tokens - known
                played.append(Played(number, index, messages, turn.answer_tokens, outcome, new))
                if not outcome.ok:
                    break
                known = outcome.prompt_tokens + outcome.output_tokens
                messages = [*messages, {"role": "assistant", "content": outcome.text}]
            return played

        start = time.perf_counter()
        found = await asyncio.gather(*(converse(number, turns) for number, turns in enumerate(sessions)))
        return list(chain.from_iterable(found)), time.perf_counter() - start


async def count_equal(client: LoadClient, turns: Sequence[Played]) -> int:
    """Send played turns again, one after the other, and count the answers that are equal."""
    equal = 0
    async with client.connect(turns[0].messages) as connection:
        for each in turns:
            again = await client.send(connection, LoadRequest(each.messages, each.answer_tokens))
            equal += again.text == each.outcome.text
    return equal


def summarise_agents(played: Sequence[Played], seconds: float) -> dict[str, Any]:
    """Times to the first token, and tokens computed against new ones; times in seconds."""
    done = [each for each in played if each.outcome.ok]
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(played) - len(done),
        "errors": errors_of([each.outcome for each in played]),
    }
    for name, turns in (("ttft", done), ("later_ttft", [each for each in done if each.turn])):
        times = [each.outcome.ttft for each in turns] or [0.0]
        found |= {f"{name}_p{percent}": percentile(times, percent) for percent in (50, 90)}
    prompt, new = sum(each.outcome.prompt_tokens for each in done), sum(each.new_tokens for each in done)
    computed = [each.computed_tokens for each in done]
    found |= {"prompt_tokens": prompt, "new_tokens": new, "computed_tokens": None, "hit_rate": None}
    if None not in computed:
        total = sum(each for each in computed if each is not None)
        found |= {"computed_tokens": total, "hit_rate": 1 - total / prompt if prompt else 0.0}
    output = sum(each.outcome.output_tokens for each in done)
    return found | {"output_tokens": output, "output_throughput": output / seconds}


def spread_over(played: Sequence[Played], count: int) -> list[Played]:
    """`count` of the turns that were answered, evenly over all of them."""
    done = [each for each in played if each.outcome.ok]
    count = min(count, len(done))
    return [done[number * len(done) // count] for number in range(count)]
