"""Does a model hold past the length it was trained for? Loss along a text that is several times as long.

With `streaming-shift` positions are re-assigned within the cache, so text may run past the trained context. Three
measurements on the demo model (trained on 4,096 tokens), in windows of 2,000 tokens:

- scored: the loss on given text, read as one prompt;
- apart: the same windows, each read as a prompt of its own with a full cache: how hard the text is;
- written: the loss of the model's own samples on a text that it keeps writing.

Flat columns mean that the model does not notice. Run: python -m winnow_lab.answers.long_text --tokens 20000
"""

import json
import math
import sys
from dataclasses import dataclass

from transformers import AutoTokenizer

from winnow import LLM, SamplingParams
from winnow.models import DEMO_MODEL
from winnow.outputs import LogprobDict
from winnow_lab.checkout import ROOT
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study

PROMPTS = ROOT / "examples" / "demo" / "prompts.jsonl"


@dataclass(frozen=True)
class Options(StudyOptions):
    """The text and the cache."""

    tokens: int = flag(20_000, least=501)
    window: int = flag(2_000, least=2)
    kv_budget: int = flag(1_024, least=1)
    seed: int = flag(0)
    skip_written: bool = flag(False, "score given text only")


def prose(tokens: int) -> list[int]:
    """That many tokens of the demo prompts' text, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, local_files_only=True)
    ids: list[int] = []
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        ids += tokenizer(json.loads(line)["prompt"], add_special_tokens=False).input_ids
        if len(ids) >= tokens:
            return ids[:tokens]
    raise SystemExit(f"error: the demo prompts hold {len(ids)} tokens, --tokens asks for {tokens}")


def losses(tokens: list[int], logprobs: list[LogprobDict | None]) -> list[float]:
    """Nats of each token that has a logprob."""
    return [-entry[token].logprob for token, entry in zip(tokens, logprobs, strict=True) if entry is not None]


def windows(values: list[float], size: int) -> list[float]:
    """Perplexity of each full window of `size` tokens."""
    return [
        math.exp(sum(values[i : i + size]) / size) for i in range(0, len(values) - len(values) % size, size)
    ]


def study(options: Options) -> Result:
    """The three measurements."""
    size, rows = options.window, {}
    with LLM(
        eviction="streaming-shift",
        kv_budget=options.kv_budget,
        kv_memory="32MiB",
        max_model_len=options.tokens + 16,
        seed=options.seed,
    ) as llm:
        text = prose(options.tokens)
        [read] = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=0))
        rows["scored"] = windows(losses(text, read.prompt_logprobs or []), size)
        pieces = [text[i : i + size] for i in range(0, len(text) - size + 1, size)]
        alone = llm.generate(pieces, SamplingParams(max_tokens=1, prompt_logprobs=0, eviction="full"))
        rows["apart"] = [
            windows(losses(piece, output.prompt_logprobs or []), size - 1)[0]
            for piece, output in zip(pieces, alone, strict=True)
        ]
        if not options.skip_written:
            start = text[:500]
            params = SamplingParams(max_tokens=options.tokens - len(start), ignore_eos=True, logprobs=0)
            answer = llm.generate([start], params)[0].outputs[0]
            rows["written"] = windows(losses(list(answer.token_ids), answer.logprobs or []), size)
    columns = tuple(f"to {size * (i + 1):,}" for i in range(len(rows["scored"])))
    lines = tuple((name, tuple(f"{each:.1f}" for each in found)) for name, found in rows.items())
    fact = f"Demo model, trained on 4,096 tokens; streaming-shift with {options.kv_budget} KVs per row."
    table = TextTable(f"Perplexity by window of {size:,}", "", columns, lines)
    return Result("Text beyond the trained length", [table], [fact], numbers={"perplexity": rows})


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
