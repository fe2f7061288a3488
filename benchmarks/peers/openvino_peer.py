"""OpenVINO GenAI's `ContinuousBatchingPipeline` on one piece of work; runs in that peer's environment.

Options: `precision` of the arithmetic, `kv_precision` (f32, bf16, u8), `kv_blocks` (of 32 tokens, in all layers),
`eviction` (tokens that a sequence is held to while it decodes; null: all are kept), `step` (tokens computed at once;
null: as many as by default).
"""

import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Work, serve

# Beginning and end of a sequence that are never evicted: a block of sinks, and four of the latest tokens.
START_TOKENS, RECENT_TOKENS = 32, 128


def scheduler(options: dict[str, Any]) -> genai.SchedulerConfig:
    """The pipeline's limits."""
    config = genai.SchedulerConfig()
    config.num_kv_blocks = options["kv_blocks"]
    config.enable_prefix_caching = False
    if options["step"] is not None:
        config.max_num_batched_tokens = options["step"]
    if options["eviction"] is not None:
        config.use_cache_eviction = True
        config.cache_eviction_config = genai.CacheEvictionConfig(
            START_TOKENS, RECENT_TOKENS, options["eviction"], genai.AggregationMode.NORM_SUM
        )
    return config


def answer(
    pipeline: genai.ContinuousBatchingPipeline, prompts: list[list[int]], new_tokens: int
) -> tuple[float, list[list[int]]]:
    """Answer all prompts, greedily. Returns seconds and tokens."""
    config = genai.GenerationConfig()
    config.max_new_tokens = new_tokens
    config.ignore_eos = True
    config.do_sample = False
    tensors = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    start = time.perf_counter()
    results = pipeline.generate(tensors, [config] * len(tensors))
    seconds = time.perf_counter() - start
    return seconds, [list(result.m_generation_ids[0]) for result in results]


def run(work: Work) -> tuple[float, list[list[int]]]:
    """Load, warm up with one tiny request, answer."""
    properties = {
        "INFERENCE_NUM_THREADS": work.threads,
        "INFERENCE_PRECISION_HINT": work.options["precision"],
        "KV_CACHE_PRECISION": work.options["kv_precision"],
    }
    pipeline = genai.ContinuousBatchingPipeline(work.model, scheduler(work.options), "CPU", properties)
    answer(pipeline, [work.prompts[0][:8]], 2)
    return answer(pipeline, work.prompts, work.new_tokens)


if __name__ == "__main__":
    serve(run, packages=["openvino", "openvino-genai"])
