"""Does a model hold past the length it was trained for? Loss along a text that is several times as long.

With `streaming-shift` positions are re-assigned within the cache, so text may run past the trained context. Three
measurements on the demo model (trained on 4,096 tokens), in windows of 2,000 tokens:

- scored: the loss on given text, read as one prompt;
- apart: the same windows, each read as a prompt of its own with a full cache: how hard the text is;
- written: the loss of the model's own samples on a text that it keeps writing.

Flat columns mean that the model does not notice. Run: python -m winnow_lab.answers.long_text --tokens 20000
"""

import argparse
import json
import math
import platform

import torch
from transformers import AutoTokenizer

from winnow import LLM, SamplingParams
from winnow.models import DEMO_MODEL
from winnow.outputs import LogprobDict
from winnow_lab.checkout import ROOT

PROMPTS = ROOT / "examples" / "demo" / "prompts.jsonl"


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=2_000)
    parser.add_argument("--kv-budget", type=int, default=1_024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-written", action="store_true", help="score given text only")
    arguments = parser.parse_args()
    llm = LLM(
        eviction="streaming-shift",
        kv_budget=arguments.kv_budget,
        kv_memory="32MiB",
        max_model_len=arguments.tokens + 16,
        seed=arguments.seed,
    )
    print(
        f"demo model, trained on 4096 tokens; streaming-shift with {arguments.kv_budget} KVs per row; "
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    text = prose(arguments.tokens)
    rows = {}
    [read] = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=0))
    rows["scored"] = windows(losses(text, read.prompt_logprobs or []), arguments.window)
    pieces = [
        text[i : i + arguments.window] for i in range(0, len(text) - arguments.window + 1, arguments.window)
    ]
    alone = llm.generate(pieces, SamplingParams(max_tokens=1, prompt_logprobs=0, eviction="full"))
    rows["apart"] = [
        windows(losses(piece, output.prompt_logprobs or []), arguments.window - 1)[0]
        for piece, output in zip(pieces, alone, strict=True)
    ]
    if not arguments.skip_written:
        start = text[:500]
        params = SamplingParams(max_tokens=arguments.tokens - len(start), ignore_eos=True, logprobs=0)
        [written] = llm.generate([start], params)
        answer = written.outputs[0]
        rows["written"] = windows(losses(answer.token_ids, answer.logprobs or []), arguments.window)
    for name, perplexities in rows.items():
        print(
            f"{name:8} perplexity by window of {arguments.window}:",
            " ".join(f"{p:.1f}" for p in perplexities),
        )


if __name__ == "__main__":
    main()
