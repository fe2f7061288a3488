"""`winnow bench serve`: load on a server of the OpenAI API."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from winnow.errors import ConfigError, UsageError
from winnow.values.checks import check_number
from winnow_lab.bench.serve import CHAT, COMPLETIONS, METRICS, LoadClient, LoadRequest, summarise
from winnow_lab.bench.traces import read_trace, scaled
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag

SUMMARY = "load on a running server, and what its clients see"
ARGUMENTS = ""
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


@dataclass(frozen=True)
class Options(StudyOptions):
    base_url: str = flag("http://127.0.0.1:8000", "the server")
    host: str | None = flag(None, "of the server, in place of --base-url")
    port: int | None = flag(None, "likewise", least=1)
    endpoint: str = flag(COMPLETIONS, "path", choices=(COMPLETIONS, CHAT))
    model: str | None = flag(None, "the model's name (default: the one served there)")
    api_key: str | None = flag(None, "also from WINNOW_API_KEY or OPENAI_API_KEY")
    dataset: Path | None = flag(None, "prompts, one a line")
    trace: Path | None = flag(None, "arrivals and lengths that were recorded")
    trace_tokens: float = flag(1.0, "lengths times this", least=1e-6)
    trace_rate: float = flag(1.0, "arrivals so much denser", least=1e-6)
    trace_longest: int | None = flag(None, "leave requests with more tokens altogether out")
    num_prompts: int = flag(100, "requests", least=1)
    request_rate: float | None = flag(None, "per second on average (default: all at once)", least=1e-6)
    burstiness: float = flag(1.0, "1: a Poisson process; below 1: bursts; above: more evenly", least=1e-3)
    max_concurrency: int | None = flag(None, "most in progress; others wait at the client", least=1)
    random_input_len: int = flag(256, "tokens of a random prompt", least=1, aliases=("input_len",))
    random_output_len: int = flag(64, "tokens of an answer", least=1, aliases=("output_len",))
    random_range_ratio: float = flag(0.0, "lengths vary evenly between 1 - this and 1 + this times", least=0)
    random_prefix_len: int = flag(0, "tokens at the front that all random prompts share", least=0)
    vocab_size: int = flag(1000, "random token ids are below this, and above 99", least=101)
    seed: int = flag(0, "of prompts, lengths and arrivals")
    temperature: float = flag(0.0, "of every request")
    ignore_eos: bool = flag(True, "let every answer have its full length")
    goodput: tuple[str, ...] = flag((), "limits of ttft, tpot and e2el, as NAME:MS", nargs="+")
    metric_percentiles: tuple[float, ...] = flag((50.0, 90.0, 95.0, 99.0), "percentiles to tell", least=0)
    save_detailed: bool = flag(False, "with --json, also the times of every request")
    ready_check_timeout: float = flag(60.0, "seconds to wait for the server's first answer")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("random_range_ratio", self.random_range_ratio, 0, 1)
        for percent in self.metric_percentiles:
            check_number("metric_percentiles", percent, 0, 100)
        if self.trace is not None and self.dataset is not None:
            raise UsageError("--trace and --dataset both say what is sent, give one")
        assert self.limits is not None, "they can be read"

    @property
    def limits(self) -> dict[str, float]:
        """Milliseconds of goodput by metric; raises ConfigError where a pair is no limit."""
        limits = {}
        for pair in self.goodput:
            name, _, value = pair.partition(":")
            if name not in METRICS or name == "itl" or not value.replace(".", "", 1).isdigit():
                raise ConfigError(
                    f"goodput must hold limits such as ttft:500, tpot:50 or e2el:5000, got {pair!r}"
                )
            limits[name] = float(value)
        return limits


def measure(options: Options) -> Result:
    url = options.base_url
    if (options.host, options.port) != (None, None):
        url = f"http://{options.host or '127.0.0.1'}:{options.port or 8000}"
    requests = _requests(options)
    fields = {"temperature": options.temperature, "model": options.model}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    client = LoadClient(url, options.endpoint, fields, options.api_key, options.ready_check_timeout)
    sending = client.run(requests, arrivals(options, requests), options.max_concurrency)
    outcomes, seconds = asyncio.run(sending)
    percentiles = options.metric_percentiles
    results: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),  # as vLLM writes it
        "endpoint_type": "openai" if options.endpoint == COMPLETIONS else "openai-chat",
        "backend": "winnow",
        "model_id": options.model,
        "num_prompts": len(requests),
        "request_rate": "inf" if options.request_rate is None else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **summarise(outcomes, seconds, goodput=options.limits, percentiles=percentiles),
        "max_concurrent_requests": client.most_in_progress,
    }
    table = _table(results, ("mean", "median", *(f"p{each:g}" for each in percentiles)))
    if options.save_detailed:
        results |= {
            "ttfts": [each.ttft for each in outcomes],
            "itls": [each.itl for each in outcomes],
            "input_lens": [each.prompt_tokens for each in outcomes],
            "output_lens": [each.output_tokens for each in outcomes],
            "start_times": [each.started for each in outcomes],
        }
    return Result("winnow bench serve", [table], numbers=results, ok=not results["failed"])


def random_requests(options: Options) -> list[LoadRequest]:
    """Requests of random tokens; equal for equal seeds."""
    generator = random.Random(options.seed)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(100, options.vocab_size) for _ in range(count)]

    def length(mean: int) -> int:
        spread = options.random_range_ratio
        return max(1, round(mean * generator.uniform(1 - spread, 1 + spread)))

    prefix = tokens(options.random_prefix_len)
    found = []
    for _ in range(options.num_prompts):
        prompt = prefix + tokens(length(options.random_input_len))
        found.append(LoadRequest(prompt, length(options.random_output_len)))
    return found


def arrivals(options: Options, requests: Sequence[LoadRequest]) -> list[float]:
    """Seconds after the start at which each request is sent.

    Gaps are drawn from a gamma distribution of shape `burstiness`, then stretched so that the last request leaves when
    the rate says it should.
    """
    if requests and requests[0].arrival is not None:
        return [each.arrival or 0.0 for each in requests]
    rate, shape = options.request_rate, options.burstiness
    if rate is None or rate == float("inf"):
        return [0.0] * len(requests)
    generator = random.Random(f"arrivals {options.seed}")
    gaps = [generator.gammavariate(shape, 1 / (rate * shape)) for _ in requests]
    total = sum(gaps)
    stretch = len(requests) / rate / total if total else 1.0
    return list(accumulate(gap * stretch for gap in gaps))


def _requests(options: Options) -> list[LoadRequest]:
    try:
        if options.trace is not None:
            trace = read_trace(options.trace, options.num_prompts)
            tokens, rate = options.trace_tokens, options.trace_rate
            kept = scaled(trace, tokens=tokens, rate=rate, longest=options.trace_longest)
            if not kept:
                raise UsageError("--trace-longest leaves no request")
            prompts = (each.prompt(options.vocab_size, options.seed + i) for i, each in enumerate(kept))
            return [LoadRequest(p, r.output_tokens, r.arrival) for p, r in zip(prompts, kept, strict=True)]
        if options.dataset is not None:
            return _dataset(options.dataset, options)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None
    return random_requests(options)


def _dataset(path: Path, options: Options) -> list[LoadRequest]:
    found: list[LoadRequest] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines[: options.num_prompts], start=1):
        try:
            row = json.loads(line)
            found.append(LoadRequest(row["prompt"], int(row.get("max_tokens", options.random_output_len))))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{path}, line {number}: must be an object with a prompt") from None
    if not found:
        raise UsageError(f"{path} holds no prompt")
    return found


def _table(results: dict[str, Any], names: Sequence[str]) -> TextTable:
    rows = tuple(
        (f"{metric} ms", tuple(f"{results[f'{name}_{metric}_ms']:.2f}" for name in names))
        for metric in METRICS
    )
    goodput = results["request_goodput"]
    good = "" if goodput is None else f", goodput {goodput:.2f}/s"
    note = (
        f"{results['completed']} answered, {results['failed']} failed in {results['duration']:.1f} s: "
        f"{results['request_throughput']:.2f} requests/s{good}, {results['output_throughput']:.1f} output tokens/s, "
        f"{results['total_token_throughput']:.1f} tokens/s"
    )
    return TextTable("What clients saw", "", tuple(names), rows, (note, *results["errors"]))
