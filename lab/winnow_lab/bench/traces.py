"""Arrivals of real requests: what production traces recorded, as token counts, and prompts made to fit them.

Two formats are read, by the file's name: the Azure LLM inference traces of 2023 (`.csv`: TIMESTAMP, ContextTokens,
GeneratedTokens) and the Mooncake traces (`.jsonl`: timestamp in milliseconds, input_length, output_length, hash_ids).
Both record lengths, no text. Mooncake's `hash_ids` name the 512-token blocks of a prompt: equal ids, equal beginnings.
"""

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

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
        block_tokens: tokens of a block of the prompt.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = HASHED_TOKENS

    def prompt(self, vocab_size: int, seed: int) -> list[int]:
        """Return token ids with the trace's length; prompts begin alike as their `hash_ids` do.

        Args:
            vocab_size: ids are below it.
            seed: of the blocks without a hash id; another for each request.
        """
        token_ids: list[int] = []
        for hash_id in self.hash_ids:
            token_ids += _tokens(f"block {hash_id}", vocab_size, self.block_tokens)
        token_ids += _tokens(f"rest {seed}", vocab_size, max(self.prompt_tokens - len(token_ids), 0))
        return token_ids[: self.prompt_tokens]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Return the first requests of a trace, `limit` of them or all, by arrival.

    Raises:
        ConfigError: the file is of no known format, or a line is damaged; says which.
    """
    reader = {".csv": _azure, ".jsonl": _mooncake}.get(path.suffix)
    if reader is None:
        raise ConfigError(f"{path}: a trace is a .csv (Azure) or .jsonl (Mooncake) file")
    with path.open(encoding="utf-8", newline="") as lines:
        requests = list(islice(reader(path, lines), limit))
    if not requests:
        raise ConfigError(f"{path}: the trace holds no request")
    requests.sort(key=lambda request: request.arrival)
    start = requests[0].arrival
    return [replace(request, arrival=request.arrival - start) for request in requests]


def scaled(
    requests: Sequence[TraceRequest], *, tokens: float = 1.0, rate: float = 1.0, longest: int | None = None
) -> list[TraceRequest]:
    """Return a trace for a smaller machine: lengths times `tokens`, arrivals `rate` times as dense.

    Shared beginnings scale as well. Prompts and answers keep at least one token. Requests with more than `longest`
    tokens altogether, after scaling, are left out.
    """
    for name, value in (("tokens", tokens), ("rate", rate)):
        if value <= 0:
            raise ConfigError(f"{name} must be above 0, not {value}")
    smaller = [
        TraceRequest(
            request.arrival / rate,
            max(round(request.prompt_tokens * tokens), 1),
            max(round(request.output_tokens * tokens), 1),
            request.hash_ids,
            max(round(request.block_tokens * tokens), 1),
        )
        for request in requests
    ]
    return [
        request
        for request in smaller
        if longest is None or request.prompt_tokens + request.output_tokens <= longest
    ]


def _azure(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            # Seven decimals; datetime reads six.
            arrival = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield TraceRequest(
                arrival, max(int(row["ContextTokens"]), 1), max(int(row["GeneratedTokens"]), 1)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: not a line of an Azure trace: {error!r}") from error


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            yield TraceRequest(
                float(row["timestamp"]) / 1000,
                max(int(row["input_length"]), 1),
                max(int(row["output_length"]), 1),
                tuple(int(hash_id) for hash_id in row["hash_ids"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: not a line of a Mooncake trace: {error!r}") from error


def _tokens(name: str, vocab_size: int, count: int) -> list[int]:
    generator = random.Random(name)
    return [generator.randrange(vocab_size) for _ in range(count)]
