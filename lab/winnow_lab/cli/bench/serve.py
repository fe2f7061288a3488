"""`winnow bench serve`: load on a server of the OpenAI API."""

import argparse
import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from winnow.cli.flags.engine import add_foreign_flags, check_foreign
from winnow.cli.flags.options import add_flags, given
from winnow.cli.flags.paths import check_json_path, write_json
from winnow.cli.screen.terminal import show
from winnow.errors import UsageError
from winnow.report.provenance import commit, typed_command
from winnow.vllm import names as vllm_names
from winnow_lab.bench.serve import (
    ENDPOINTS,
    METRICS,
    LoadClient,
    LoadRequest,
    ServeLoad,
    random_requests,
    read_goodput,
    summarise,
)
from winnow_lab.bench.traces import read_trace, scaled

SUMMARY = "load on a running server, and what its clients see"
DESCRIPTION = """\
Send requests to a server of the OpenAI API (`winnow serve`, or another) and tell throughput, latencies
and goodput: requests per second that kept to every limit of --goodput.

Prompts are random tokens, lines of a dataset ({"prompt": text or token ids, "max_tokens": N}), or come
at the times and with the lengths of a recorded trace (Azure's .csv, Mooncake's .jsonl).
"""
EPILOG = """\
examples:
  winnow bench serve --num-prompts 64 --request-rate 4
  winnow bench serve --max-concurrency 32 --goodput ttft:500 tpot:50 --json out.json
  winnow bench serve --trace conversation_trace.jsonl --trace-tokens 0.05 --trace-rate 2 --num-prompts 200
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow bench serve [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: %(default)s)"
    )
    parser.add_argument("--host", metavar="NAME", help="of the server, in place of --base-url")
    parser.add_argument("--port", metavar="N", type=int, help="likewise")
    parser.add_argument(
        "--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="path (default: %(default)s)"
    )
    parser.add_argument("--model", metavar="NAME", help="the model's name; left out: the one served there")
    parser.add_argument("--api-key", metavar="KEY", help="also from WINNOW_API_KEY or OPENAI_API_KEY")
    parser.add_argument("--dataset", metavar="FILE.jsonl", type=Path, help="prompts, one a line")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="arrivals and lengths that were recorded")
    parser.add_argument("--trace-tokens", metavar="X", type=float, default=1.0, help="lengths times this")
    parser.add_argument("--trace-rate", metavar="X", type=float, default=1.0, help="arrivals so much denser")
    parser.add_argument(
        "--trace-longest", metavar="N", type=int, help="leave requests with more tokens altogether out"
    )
    parser.add_argument(
        "--goodput", metavar="NAME:MS", nargs="+", default=[], help="limits of ttft, tpot and e2el"
    )
    parser.add_argument(
        "--metric-percentiles",
        metavar="P,...",
        default="50,90,95,99",
        help="percentiles to tell (default: %(default)s)",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the results as JSON, as vLLM names them"
    )
    parser.add_argument(
        "--save-detailed", action="store_true", help="with --json, also the times of every request"
    )
    add_flags(parser, ServeLoad, "the load")
    add_foreign_flags(parser, vllm_names.BENCH)


def execute(namespace: argparse.Namespace) -> int:
    """Send, tell, and return the exit code: 1 where requests failed."""
    check_foreign(namespace, vllm_names.BENCH)
    load = ServeLoad(**given(namespace, ServeLoad))
    if (namespace.host, namespace.port) != (None, None):
        namespace.base_url = f"http://{namespace.host or '127.0.0.1'}:{namespace.port or 8000}"
    goodput = read_goodput(namespace.goodput)
    percentiles = _percentiles(namespace.metric_percentiles)
    check_json_path(namespace.json)
    requests = _requests(namespace, load)
    key = namespace.api_key or os.environ.get("WINNOW_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    client = LoadClient(namespace.base_url, namespace.endpoint, namespace.model, load, headers)
    outcomes, seconds = asyncio.run(client.run(requests))
    results: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "command": typed_command(),
        "commit": commit(),
        "endpoint_type": "openai" if namespace.endpoint == ENDPOINTS[0] else "openai-chat",
        "backend": "winnow",
        "model_id": namespace.model,
        "num_prompts": len(requests),
        "request_rate": "inf" if load.request_rate is None else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        **summarise(outcomes, seconds, goodput=goodput, percentiles=percentiles),
        "max_concurrent_requests": client.most_in_progress,
    }
    show(_table(results, percentiles))
    if namespace.save_detailed:
        results |= {
            "ttfts": [each.ttft for each in outcomes],
            "itls": [each.itl for each in outcomes],
            "input_lens": [each.prompt_tokens for each in outcomes],
            "output_lens": [each.output_tokens for each in outcomes],
            "start_times": [each.started for each in outcomes],
        }
    write_json(namespace.json, results)
    return 1 if results["failed"] else 0


def _requests(namespace: argparse.Namespace, load: ServeLoad) -> list[LoadRequest]:
    """Return what is sent.

    Raises:
        UsageError, ConfigError: a file cannot be used.
    """
    if namespace.trace is not None and namespace.dataset is not None:
        raise UsageError("--trace and --dataset both say what is sent, give one")
    try:
        if namespace.trace is not None:
            trace = read_trace(namespace.trace, load.num_prompts)
            kept = scaled(
                trace,
                tokens=namespace.trace_tokens,
                rate=namespace.trace_rate,
                longest=namespace.trace_longest,
            )
            if not kept:
                raise UsageError("--trace-longest leaves no request")
            return [
                LoadRequest(
                    each.prompt(load.vocab_size, load.seed + index),
                    each.output_tokens,
                    each.prompt_tokens,
                    each.arrival,
                )
                for index, each in enumerate(kept)
            ]
        if namespace.dataset is not None:
            return _dataset(namespace.dataset, load)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None
    return random_requests(load)


def _dataset(path: Path, load: ServeLoad) -> list[LoadRequest]:
    found: list[LoadRequest] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if len(found) == load.num_prompts:
                break
            try:
                row = json.loads(line)
                tokens = row.get("max_tokens", load.random_output_len)
                found.append(LoadRequest(row["prompt"], int(tokens)))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UsageError(f"{path}, line {number}: must be an object with a prompt") from None
    if not found:
        raise UsageError(f"{path} holds no prompt")
    return found


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        raise UsageError(f"--metric-percentiles must be numbers such as 50,99, got {text!r}") from None
    if not all(0 <= each <= 100 for each in found):
        raise UsageError(f"--metric-percentiles must be between 0 and 100, got {text!r}")
    return found


def _table(results: dict[str, Any], percentiles: list[float]) -> Table:
    table = Table(title="winnow bench serve", title_justify="left")
    for name in ("", "mean", "median", *(f"p{each:g}" for each in percentiles)):
        table.add_column(name, justify="left" if not name else "right")
    for metric in METRICS:
        names = ["mean", "median", *(f"p{each:g}" for each in percentiles)]
        table.add_row(f"{metric} ms", *(f"{results[f'{name}_{metric}_ms']:.2f}" for name in names))
    goodput = results["request_goodput"]
    good = "" if goodput is None else f", goodput {goodput:.2f}/s"
    table.caption = (
        f"{results['completed']} answered, {results['failed']} failed in {results['duration']:.1f} s: "
        f"{results['request_throughput']:.2f} requests/s{good}, {results['output_throughput']:.1f} output tokens/s, "
        f"{results['total_token_throughput']:.1f} tokens/s"
        + "".join(f"\n{error}" for error in results["errors"])
    )
    return table
