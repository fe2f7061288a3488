"""Winnow on one piece of work, in a process of its own as every peer.

Options: `kv_seqs` (KV memory for that number of whole sequences with KVs as wide as the arithmetic), `saves_prefixes`
(contexts are compressed and saved beside the model before the work begins), and those of `LLM`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from protocol import Answer, Tokens, Work, serve

from winnow import LLM, SamplingParams
from winnow.config import EngineConfig
from winnow_lab.bench.presets import kv_memory_for

NARROWER = ("kv_cache_dtype", "weight_dtype")
"""Options that leave the KV memory as it is: that is what they are compared within."""


@contextmanager
def opened(work: Work) -> Iterator[Answer]:
    torch.set_num_threads(work.threads)
    options = {"model": Path(work.model), "enable_prefix_caching": work.prefix_caching, "check": 0}
    options |= work.options
    kv_seqs, saves = options.pop("kv_seqs"), options.pop("saves_prefixes", False)
    longest = max(map(len, work.prompts)) + work.new_tokens
    wide = {name: value for name, value in options.items() if name not in NARROWER}
    options["kv_memory"] = kv_memory_for(EngineConfig.from_options(wide), kv_seqs, longest)
    if saves:
        options["prefix_store"] = folder = Path(f"{work.model}-prefixes")
        folder.mkdir(exist_ok=True)
        with LLM(**options) as llm:
            for ids, known in zip(work.prompts, work.sampling, strict=True):
                llm.save_prefix(ids[: known["context_tokens"]], folder)  # what is there is not computed again
    with LLM(**options) as llm:
        yield lambda asked: _answer(llm, asked)


def _answer(llm: LLM, work: Work) -> Tokens:
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=work.new_tokens,
            ignore_eos=True,
            stop_token_ids=work.end_tokens,
            detokenize=False,
            **each,
        )
        for each in work.sampling or [{}] * len(work.prompts)
    ]
    outputs = llm.generate(work.prompts, params)
    for output in outputs:
        output.raise_for_error()
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    serve(opened, packages=["winnow-llm", "torch", "transformers"])
