"""Arrivals of real requests: what production traces recorded, as token counts, and prompts made to fit them.

Two formats are read, by the file's name: the Azure LLM inference traces of 2023 (`.csv`: TIMESTAMP, ContextTokens,
GeneratedTokens) and the Mooncake traces (`.jsonl`: timestamp in milliseconds, input_length, output_length, hash_ids).
Both record lengths, no text. Mooncake's `hash_ids` name the 512-token blocks of a prompt: equal ids, equal beginnings.
"""

import csv
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from winnow.errors import ConfigError

HASHED_TOKENS = 512
"""Tokens of a prompt for which one of a trace's `hash_ids` stands."""


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds after the trace's first request.
        prompt_tokens, output_tokens: at least 1 each.
        hash_ids: of the prompt's blocks of `block_tokens` tokens each; empty: nothing is known of them.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = HASHED_TOKENS

    def prompt(self, vocab_size: int, seed: int) -> list[int]:
        """Token ids with the trace's length; prompts begin alike as their `hash_ids` do. `seed` differs by request."""
        token_ids: list[int] = []
        for hash_id in self.hash_ids:
            token_ids += _tokens(f"block {hash_id}", vocab_size, self.block_tokens)
        token_ids += _tokens(f"rest {seed}", vocab_size, max(self.prompt_tokens - len(token_ids), 0))
        return token_ids[: self.prompt_tokens]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first requests of a trace, `limit` of them or all, by arrival; a damaged line raises ConfigError."""
    if path.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"{path}: a trace is a .csv (Azure) or .jsonl (Mooncake) file")
    with path.open(encoding="utf-8", newline="") as lines:
        requests = list(islice(_requests(path, lines), limit))
    if not requests:
        raise ConfigError(f"{path}: the trace holds no request")
    requests.sort(key=lambda request: request.arrival)
    start = requests[0].arrival
    return [replace(request, arrival=request.arrival - start) for request in requests]


def scaled(
    requests: Sequence[TraceRequest], *, tokens: float = 1.0, rate: float = 1.0, longest: int | None = None
) -> list[TraceRequest]:
    """A trace for a smaller machine: lengths times `tokens`, arrivals `rate` times as dense.

    Shared beginnings scale as well. Prompts and answers keep at least one token. Requests with more than `longest`
    tokens altogether, after scaling, are left out.
    """
    for name, value in (("tokens", tokens), ("rate", rate)):
        if value <= 0:
            raise ConfigError(f"{name} must be above 0, not {value}")
    counts = ("prompt_tokens", "output_tokens", "block_tokens")
    smaller = [
        replace(
            each,
            arrival=each.arrival / rate,
            **{name: max(round(getattr(each, name) * tokens), 1) for name in counts},
        )
        for each in requests
    ]
    most = math.inf if longest is None else longest
    return [each for each in smaller if each.prompt_tokens + each.output_tokens <= most]


def _azure(row: Mapping[str, str]) -> TraceRequest:
    arrival = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()  # seven decimals; datetime reads six
    return TraceRequest(arrival, max(int(row["ContextTokens"]), 1), max(int(row["GeneratedTokens"]), 1))


def _mooncake(line: str) -> TraceRequest:
    row = json.loads(line)
    lengths = max(int(row["input_length"]), 1), max(int(row["output_length"]), 1)
    return TraceRequest(float(row["timestamp"]) / 1000, *lengths, tuple(map(int, row["hash_ids"])))


def _requests(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    is_azure = path.suffix == ".csv"
    rows: Iterator[Any] = csv.DictReader(lines) if is_azure else lines
    for number, row in enumerate(rows, start=1 + is_azure):
        try:
            yield _azure(row) if is_azure else _mooncake(row)
        except (KeyError, TypeError, ValueError) as error:
            kind = "an Azure" if is_azure else "a Mooncake"
            raise ConfigError(f"{path}, line {number}: not a line of {kind} trace: {error!r}") from error


def _tokens(name: str, vocab_size: int, count: int) -> list[int]:
    generator = random.Random(name)
    return [generator.randrange(vocab_size) for _ in range(count)]
