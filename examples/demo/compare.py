"""The demo's prompts twice in the same KV memory: with the whole cache, and compressed by what works on this model.

    python examples/demo/compare.py

Each answer goes on to 256 tokens, as an assistant's would, so that decoding counts; what stands before its end is
scored.
"""

import argparse
import json
import time
from pathlib import Path

from winnow import LLM, SamplingParams
from winnow.batch.metrics import score

COMPRESSION = 8.0
PROMPTS = Path(__file__).with_name("prompts.jsonl")


def answer(
    lines: list[dict[str, str]], new_tokens: int, kv_memory: str, policy: str
) -> tuple[float, float, float]:
    """Return generated tokens per second, the share that is right, and how many answers a step computed on average."""
    amounts = {} if policy == "full" else {"compression": COMPRESSION}
    with LLM(kv_memory=kv_memory, eviction=policy, max_num_seqs=32, **amounts) as llm:
        eos = llm.get_tokenizer().eos_token_id
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        began = time.perf_counter()
        outputs = llm.generate([line["prompt"] for line in lines], params)
        seconds = time.perf_counter() - began
        right = 0.0
        for line, output in zip(lines, outputs, strict=True):
            ids = list(output.outputs[0].token_ids)
            text = llm.get_tokenizer().decode(ids[: ids.index(eos)] if eos in ids else ids)
            right += score(line["metric"], text, [line["reference"]])
        tokens = len(lines) * new_tokens
        return tokens / seconds, right / len(lines), tokens / llm.stats().num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--kv-memory", default="24MiB")
    asked = parser.parse_args()
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()][
        :: 72 // asked.prompts
    ]
    policy = "leverage"  # what keeps most on the demo model (docs/which-policy.md)
    print(
        f"{len(lines)} prompts, answers of {asked.new_tokens} tokens, {asked.kv_memory} of KV memory",
        flush=True,
    )
    rows = {}
    for name in ("full", policy):
        rows[name] = answer(lines, asked.new_tokens, asked.kv_memory, name)
        rate, right, batch = rows[name]
        label = "whole cache" if name == "full" else f"{name} {COMPRESSION:g}x"
        print(
            f"{label:16} {rate:6.0f} tokens/s  {right:4.0%} right  {batch:4.1f} answers in a step", flush=True
        )
    (whole, whole_right, _), (less, less_right, _) = rows.values()
    print(
        f"same memory: {less / whole:.1f} times the tokens per second, {less_right:.0%} right for {whole_right:.0%}"
    )


if __name__ == "__main__":
    main()
