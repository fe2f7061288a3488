"""`winnow bench agents`: conversations of agents with a server."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from winnow.cli.flags.engine import open_llm
from winnow.errors import UsageError
from winnow.process.lazy import importing
from winnow_lab.bench.agents import (
    AgentLoad,
    agent_sessions,
    count_equal,
    play,
    spread_over,
    summarise_agents,
)
from winnow_lab.bench.serve import CHAT, LoadClient
from winnow_lab.report.tables import TextTable
from winnow_lab.study import EngineOptions, Result, flag

SUMMARY = "conversations of agents, many turns each, and what is computed again"
ARGUMENTS = "[MODEL] "
DESCRIPTION = """\
Play conversations of agents: each turn sends all that came before and something new, as a tool's result,
waits for the answer, and pauses. Tell the time to the first token, and how many tokens were computed
against those that were new.

Without --base-url an engine is started for it, with the engine's options; with it, any server of
OpenAI's chat completions is measured, also llama.cpp's and vLLM's.
"""
EPILOG = """\
examples:
  winnow bench agents MODEL --kv-memory 1GiB --prefix-cache-dir cache
  winnow bench agents --base-url http://127.0.0.1:8080 --num-sessions 24 --num-turns 6 --json out.json
  winnow bench agents MODEL --check 20      (answers of 20 turns, against an engine without load and cache)
"""


@dataclass(frozen=True)
class Options(AgentLoad, EngineOptions):
    base_url: str | None = flag(None, "a server (default: an engine of this command's own)")
    served_model: str | None = flag(None, "the model's name there (default: the one served)")
    api_key: str | None = flag(None, "also from WINNOW_API_KEY or OPENAI_API_KEY")
    check: int = flag(0, "turns whose answers an engine without load and cache repeats", least=0)
    check_url: str | None = flag(None, "a server that repeats them, in place of such an engine")
    CHOSEN: ClassVar[tuple[str, ...]] = ("seed", "check")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.check and self.base_url is not None and self.check_url is None:
            raise UsageError("--check needs --check-url where --base-url names the server")

    def client(self, url: str) -> LoadClient:
        asked = {"model": self.served_model, "temperature": 0.0, "ignore_eos": True}
        return LoadClient(url, CHAT, asked, self.api_key, self.ready_check_timeout)


def measure(options: Options) -> Result:
    system, sessions = agent_sessions(options)
    engine: dict[str, Any] = {}
    with _server(options.base_url, dict(options.engine), engine) as url:
        played, seconds = asyncio.run(play(options.client(url), options, system, sessions))
    results: dict[str, Any] = {
        "load": {each.name: getattr(options, each.name) for each in fields(AgentLoad)},
        **summarise_agents(played, seconds),
        "engine": engine,
    }
    if options.check:
        turns = spread_over(played, options.check)
        unloaded = {**options.engine, "enable_prefix_caching": False}
        for name in ("prefix_cache_dir", "prefix_store"):
            unloaded.pop(name, None)
        with _server(options.check_url, unloaded, {}) as url:
            equal = asyncio.run(count_equal(options.client(url), turns))
        results |= {"num_checked": len(turns), "num_equal": equal}
    is_equal = results.get("num_equal") == results.get("num_checked")
    return Result(
        "winnow bench agents", [_table(results)], numbers=results, ok=is_equal and not results["failed"]
    )


@contextmanager
def _server(url: str | None, options: dict[str, Any], stats: dict[str, Any]) -> Iterator[str]:
    """Yield a server's address: that which is given, or one of an engine that is started; `stats` gets its counters."""
    if url is not None:
        yield url
        return
    with importing():
        from winnow.server.access import Keys
        from winnow.server.config import ServerConfig
        from winnow.server.listening import bound_sockets
        from winnow.server.server import Server
        from winnow.server.service import Service, load_reader, model_names
    config = ServerConfig(port=0, log_level="warning")
    with bound_sockets(config) as sockets, open_llm(options) as llm:
        service = Service(
            llm, config, Keys({}), model_names(options.get("model"), ()), load_reader(None, llm.tokenizer)
        )
        addresses: list[str] = []
        started = threading.Event()

        def note(address: str) -> None:
            addresses.append(address)
            started.set()

        server = Server(service, note)
        thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
        thread.start()
        started.wait()
        try:
            yield addresses[0]
            counters = llm.stats()
            stats |= {
                "prompt_tokens": counters.prompt_tokens,
                "cached_tokens": counters.cached_tokens,
                "preemptions": counters.num_preemptions,
                "kv_bytes_budget": counters.kv_bytes_budget,
                "disk_tier": None if counters.disk_tier is None else asdict(counters.disk_tier),
            }
        finally:
            server.should_exit = True
            thread.join()


def _table(results: dict[str, Any]) -> TextTable:
    rows = tuple(
        (label, tuple(f"{results[f'{name}_p{each}']:.2f}" for each in (50, 90)))
        for name, label in (("ttft", "all turns"), ("later_ttft", "after the first"))
    )
    computed, rate = results["computed_tokens"], results["hit_rate"]
    told = "the server does not say how many were computed"
    if computed is not None:
        told = f"{computed:,} computed, {rate:.1%} found"
    notes = [
        f"{results['completed']} turns answered, {results['failed']} failed in {results['duration']:.1f} s; "
        f"{results['new_tokens']:,} new of {results['prompt_tokens']:,} prompt tokens, {told}; "
        f"{results['output_throughput']:.1f} output tokens/s"
    ]
    if "num_checked" in results:
        notes.append(f"{results['num_equal']} of {results['num_checked']} answers equal")
    return TextTable("Time to the first token, s", "", ("p50", "p90"), rows, (*notes, *results["errors"]))
