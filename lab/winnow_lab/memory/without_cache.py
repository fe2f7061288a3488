"""What the KV cache saves: the same answer with it, and with every token computed from the whole text again.

    python -m winnow_lab.memory.without_cache [MODEL]

The text on KV cache memory estimates 180 s without and 12 s with a cache for 4,096 tokens. Without one a token is a
prompt of all tokens before it that is answered by one; both answers must be the same. Work without a cache grows with
the square of the length, so the longest answer tells most.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from winnow import LLM
from winnow_lab.bench.answering import fixed_length
from winnow_lab.report.tables import TextTable
from winnow_lab.study import ModelOptions, Result, flag, run_study


@dataclass(frozen=True)
class Options(ModelOptions):
    model: str | None = flag(None, "directory or GGUF file (default: the demo model)", positional=True)
    tokens: tuple[int, ...] = flag((128, 256, 512), "of an answer", least=1)
    prompt: int = flag(16, "tokens", least=1)


def seconds_with(llm: LLM, prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
    start = time.perf_counter()
    [output] = llm.generate([list(prompt)], fixed_length(tokens))
    return list(output.outputs[0].token_ids), time.perf_counter() - start


def seconds_without(llm: LLM, prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
    """Return the same of a loop that keeps no keys and values."""
    text = list(prompt)
    start = time.perf_counter()
    for _ in range(tokens):
        text += seconds_with(llm, text, 1)[0]
    return text[len(prompt) :], time.perf_counter() - start


def measure(options: Options) -> Result:
    rows, numbers = [], []
    sizes: dict[str, Any] = {"kv_memory": "1GiB", "dtype": "float32", "threads": options.threads}
    with LLM(options.model, enable_prefix_caching=False, **sizes) as llm:
        prompt = range(100, 100 + options.prompt)
        seconds_with(llm, prompt, 2)  # libraries set themselves up
        for tokens in options.tokens:
            (kept, fast), (anew, slow) = (way(llm, prompt, tokens) for way in (seconds_with, seconds_without))
            same = sum(a == b for a, b in zip(kept, anew, strict=True)) / tokens
            numbers.append({"tokens": tokens, "with": fast, "without": slow, "same": same})
            rows.append((f"{tokens:,}", (f"{fast:.2f}", f"{slow:.2f}", f"{slow / fast:.1f}x", f"{same:.0%}")))
    columns = ("with a cache, s", "without, s", "times", "same tokens")
    table = TextTable("Seconds", "new tokens", columns, tuple(rows))
    return Result("What the KV cache saves", [table], numbers={"rows": numbers})


if __name__ == "__main__":
    sys.exit(run_study(Options, measure))
