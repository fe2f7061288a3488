"""Winnow on one piece of work, in a process of its own as every peer.

Options: `kv_seqs` (KV memory for that number of whole sequences with KVs as wide as the arithmetic), and those of
`LLM`.
"""

import time
from pathlib import Path

import torch
from protocol import Work, serve

from winnow import LLM, SamplingParams
from winnow.bench.room import kv_memory_for
from winnow.config import EngineConfig

NARROWER = ("kv_cache_dtype", "weight_dtype")
"""Options that leave the KV memory as it is: that is what they are compared within."""


def run(work: Work) -> tuple[float, list[list[int]]]:
    """Load, warm up with one tiny request, answer."""
    torch.set_num_threads(work.threads)
    options = {"model": Path(work.model)} | work.options
    kv_seqs = options.pop("kv_seqs")
    longest = max(map(len, work.prompts)) + work.new_tokens
    wide = {name: value for name, value in options.items() if name not in NARROWER}
    options["kv_memory"] = kv_memory_for(EngineConfig.from_options(wide), kv_seqs, longest)

    def greedy(tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    with LLM(**options) as llm:
        llm.generate(work.prompts[0][:8], greedy(2))
        start = time.perf_counter()
        outputs = llm.generate(work.prompts, greedy(work.new_tokens))
        seconds = time.perf_counter() - start
    return seconds, [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    serve(run, packages=["winnow-llm", "torch", "transformers"])
