"""What a file's own bits, and fewer, cost in accuracy: WikiText-2's perplexity of one pass over each window.

    python -m winnow_lab.speed.weight_bits --model models/SmolLM2-135M-Instruct.Q4_1.gguf --json FILE

Beside the same weights as numbers of float32, which plain torch computes with. The full cache, the first 64 tokens of a
window not counted. Ratios are of the same windows, geometric means and standard errors over them.
"""

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow import LLM, SamplingParams
from winnow_lab.evaluate.wikitext import cut_windows, wikitext
from winnow_lab.report import standard_error
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study

GIVEN = 64
SETTINGS: dict[str, dict[str, Any]] = {
    "numbers": {"dtype": "float32", "optimize": False},
    "default": {},
    "own-bits-float32": {"dtype": "float32"},
    "own-bits-bfloat16": {"dtype": "bfloat16"},
    "q8_0": {"dtype": "bfloat16", "weight_dtype": "q8_0"},
    "q4_0": {"dtype": "bfloat16", "weight_dtype": "q4_0"},
}


@dataclass(frozen=True)
class Options(StudyOptions):
    model: Path = flag()
    rows: tuple[str, ...] = flag(
        tuple(SETTINGS), "of the table; ratios are of the first", choices=tuple(SETTINGS)
    )
    windows: int = flag(16, least=1)
    tokens: int = flag(1024, "of a window", least=GIVEN + 1)
    threads: int = flag(1, "of torch", least=1)


def losses(options: Options, own: dict[str, Any]) -> list[float]:
    """Mean negative log likelihood of a token, by window."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    with LLM(options.model, threads=options.threads, **own) as llm:
        windows = cut_windows(llm.tokenizer, wikitext(), options.tokens, GIVEN, options.windows)
        prompts = [[*window.context, *window.continuation] for window in windows]
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            entries = list(zip(prompt, output.prompt_logprobs or [], strict=True))[GIVEN:]
            logprobs = [entry[token].logprob for token, entry in entries if entry is not None]
            found.append(-statistics.fmean(logprobs))
    return found


def change(mine: list[float], theirs: list[float]) -> tuple[float, float]:
    """Ratio of perplexities, and its standard error."""
    differences = [a - b for a, b in zip(mine, theirs, strict=True)]
    ratio = math.exp(statistics.fmean(differences))
    return ratio, ratio * (standard_error(differences) or 0.0)


def study(options: Options) -> Result:
    found = {}
    for name in options.rows:
        found[name] = losses(options, SETTINGS[name])
        print(f"{name}: {math.exp(statistics.fmean(found[name])):.4f}", file=sys.stderr, flush=True)
    ratios = {name: change(own, found[options.rows[0]]) for name, own in found.items()}
    lines = [
        "{} | {:.3f} | {:.4f} ± {:.4f}".format(name, math.exp(statistics.fmean(own)), *ratios[name])
        for name, own in found.items()
    ]
    title = f"{options.model.name}, {options.windows} windows of {options.tokens} tokens"
    table = TextTable.read(title, "weights | perplexity | of the first", lines)
    return Result("What bits of weights cost", [table], numbers={"losses": found, "ratios": ratios})


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
