"""`winnow bench agents`: conversations of agents with a server."""

import argparse
import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from winnow.cli.flags.engine import add_engine_flags, engine_options, open_llm
from winnow.cli.flags.options import add_flags, add_model_argument, given
from winnow.cli.flags.paths import check_json_path, write_json
from winnow.cli.screen.terminal import show
from winnow.errors import UsageError
from winnow.lazy import importing
from winnow.report.provenance import Machine, report_head, typed_command
from winnow_lab.bench.agents import (
    AgentLoad,
    AgentPlayer,
    Played,
    agent_sessions,
    spread_over,
    summarise_agents,
)

SUMMARY = "conversations of agents, many turns each, and what is computed again"
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


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow bench agents [MODEL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_model_argument(parser)
    parser.add_argument(
        "--base-url", metavar="URL", help="a server; left out: an engine of this command's own"
    )
    parser.add_argument(
        "--served-model", metavar="NAME", help="the model's name there; left out: the one served"
    )
    parser.add_argument("--api-key", metavar="KEY", help="also from WINNOW_API_KEY or OPENAI_API_KEY")
    parser.add_argument("--text", metavar="FILE", type=Path, help="text of which turns are passages")
    parser.add_argument(
        "--check",
        metavar="N",
        type=int,
        default=0,
        help="turns whose answers an engine without load and cache repeats",
    )
    parser.add_argument(
        "--check-url", metavar="URL", help="a server that repeats them, in place of such an engine"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results as JSON")
    add_flags(parser, AgentLoad, "the load")
    add_engine_flags(parser, skip=("seed",))


def execute(namespace: argparse.Namespace) -> int:
    """Play, tell, and return the exit code: 1 where turns failed or answers differ."""
    load = AgentLoad(**given(namespace, AgentLoad))
    check_json_path(namespace.json)
    if namespace.check and namespace.base_url is not None and namespace.check_url is None:
        raise UsageError("--check needs --check-url where --base-url names the server")
    options = engine_options(namespace)
    try:
        text = "" if namespace.text is None else namespace.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {namespace.text}: {error}") from None
    key = namespace.api_key or os.environ.get("WINNOW_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    system, sessions = agent_sessions(load, text)
    engine: dict[str, Any] = {}
    with _server(namespace.base_url, options, engine) as url:
        player = AgentPlayer(url, namespace.served_model, load, headers)
        played, seconds = asyncio.run(player.play(system, sessions))
    results: dict[str, Any] = {
        **report_head(typed_command(), Machine.here()),
        "load": asdict(load),
        **summarise_agents(played, seconds),
        "engine": engine,
    }
    if namespace.check:
        turns = spread_over(played, namespace.check)
        unloaded = {**options, "enable_prefix_caching": False}
        for name in ("prefix_cache_dir", "prefix_store"):
            unloaded.pop(name, None)
        with _server(namespace.check_url, unloaded, {}) as url:
            player = AgentPlayer(url, namespace.served_model, load, headers)
            results |= _compare(turns, asyncio.run(player.answer_again(turns)))
    show(_table(results))
    write_json(namespace.json, results)
    return 1 if results["failed"] or results.get("num_equal") != results.get("num_checked") else 0


def _compare(turns: Sequence[Played], texts: Sequence[str]) -> dict[str, int]:
    equal = sum(each.outcome.text == text for each, text in zip(turns, texts, strict=True))
    return {"num_checked": len(turns), "num_equal": equal}


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


def _table(results: dict[str, Any]) -> Table:
    table = Table(title="winnow bench agents", title_justify="left")
    for name in ("time to first token, s", "p50", "p90"):
        table.add_column(name, justify="left" if name[0] == "t" else "right")
    for name, label in (("ttft", "all turns"), ("later_ttft", "after the first")):
        table.add_row(label, *(f"{results[f'{name}_p{each}']:.2f}" for each in (50, 90)))
    computed, rate = results["computed_tokens"], results["hit_rate"]
    told = "the server does not say how many were computed"
    if computed is not None:
        told = f"{computed:,} computed, {rate:.1%} found"
    table.caption = (
        f"{results['completed']} turns answered, {results['failed']} failed in {results['duration']:.1f} s; "
        f"{results['new_tokens']:,} new of {results['prompt_tokens']:,} prompt tokens, {told}; "
        f"{results['output_throughput']:.1f} output tokens/s"
        + (
            f"; {results['num_equal']} of {results['num_checked']} answers equal"
            if "num_checked" in results
            else ""
        )
        + "".join(f"\n{error}" for error in results["errors"])
    )
    return table
