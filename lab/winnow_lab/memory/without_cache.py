"""What the KV cache saves: the same answer with it, and with every token computed from the whole text again.

    python -m winnow_lab.memory.without_cache MODEL [--tokens 128,256,512] [--prompt 16] [--threads 1]

The text on KV cache memory estimates 180 s without and 12 s with a cache for 4,096 tokens. Without one a token is a
prompt of all tokens before it that is answered by one; both answers must be the same. Work without a cache grows with
the square of the length, so the longest answer tells most.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from winnow import LLM
from winnow_lab.bench.answering import fixed_length


def seconds_with(llm: LLM, prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
    """Return the answer, and what it took."""
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


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="(default: the demo model)")
    parser.add_argument("--tokens", type=lambda text: [*map(int, text.split(","))], default=[128, 256, 512])
    parser.add_argument("--prompt", type=int, default=16, help="tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    table = Table("new tokens", "with a cache, s", "without, s", "times", "same tokens")
    with LLM(
        arguments.model,
        kv_memory="1GiB",
        dtype="float32",
        threads=arguments.threads,
        enable_prefix_caching=False,
    ) as llm:
        prompt = range(100, 100 + arguments.prompt)
        seconds_with(llm, prompt, 2)  # libraries set themselves up
        for tokens in arguments.tokens:
            (kept, fast), (anew, slow) = (
                measure(llm, prompt, tokens) for measure in (seconds_with, seconds_without)
            )
            same = sum(a == b for a, b in zip(kept, anew, strict=True)) / tokens
            table.add_row(f"{tokens:,}", f"{fast:.2f}", f"{slow:.2f}", f"{slow / fast:.1f}x", f"{same:.0%}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
