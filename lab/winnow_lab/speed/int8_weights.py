"""What int8 weights cost in accuracy, by which layers stay wide: WikiText-2's perplexity of one pass over each window.

    python -m winnow_lab.speed.int8_weights --model models/SmolLM2-135M-Instruct.Q4_1.gguf [--windows 16]
        [--tokens 1024] [--threads 1] [--json FILE]

The full cache, the first 64 tokens of a window not counted. Ratios are of the same windows, geometric means and
standard errors over them.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from winnow import LLM, SamplingParams
from winnow.cli.flags.paths import check_json_path, write_json
from winnow.config import WIDE_WEIGHTS
from winnow.report.provenance import Machine, report_head
from winnow_lab.evaluate.wikitext import cut_windows, wikitext
from winnow_lab.report.console import console, print_tables
from winnow_lab.report.tables import TextTable

GIVEN = 64
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    **{f"int8, wide: {wide}": {"weight_dtype": "int8", "weight_wide": wide} for wide in WIDE_WEIGHTS},
    "q8_0": {"weight_dtype": "q8_0"},
}


def losses(arguments: argparse.Namespace, options: dict[str, Any]) -> list[float]:
    """Mean negative log likelihood of a token, by window."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    with LLM(arguments.model, dtype=arguments.dtype, threads=arguments.threads, **options) as llm:
        windows = cut_windows(llm.tokenizer, wikitext(), arguments.tokens, GIVEN, arguments.windows)
        prompts = [[*window.context, *window.continuation] for window in windows]
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            entries = list(zip(prompt, output.prompt_logprobs or [], strict=True))[GIVEN:]
            found.append(
                -statistics.fmean(entry[token].logprob for token, entry in entries if entry is not None)
            )
    return found


def change(mine: list[float], theirs: list[float]) -> tuple[float, float]:
    """Ratio of perplexities, and its standard error."""
    differences = [a - b for a, b in zip(mine, theirs, strict=True)]
    ratio = math.exp(statistics.fmean(differences))
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return ratio, ratio * error


def main() -> None:
    """Measure every setting, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="of a window")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    arguments = parser.parse_args()
    check_json_path(arguments.json)
    found = {}
    for name, options in SETTINGS.items():
        found[name] = losses(arguments, options)
        print(f"{name}: {math.exp(statistics.fmean(found[name])):.4f}", file=sys.stderr, flush=True)
    ratios = {name: change(own, found["auto"]) for name, own in found.items()}
    rows = tuple(
        (name, (f"{math.exp(statistics.fmean(own)):.3f}", f"{ratios[name][0]:.4f} ± {ratios[name][1]:.4f}"))
        for name, own in found.items()
    )
    machine = Machine.here()
    head = report_head([Path(sys.argv[0]).name, *sys.argv[1:]], machine)
    title = (
        f"{machine}; commit {head['commit']}, {head['date']}; {arguments.model.name}, {arguments.dtype}, "
        f"{arguments.windows} windows of {arguments.tokens} tokens"
    )
    print_tables(console(), [TextTable(title, "weights", ("perplexity", "of auto"), rows, ())])
    write_json(arguments.json, head | {"losses": found, "ratios": ratios})


if __name__ == "__main__":
    main()
