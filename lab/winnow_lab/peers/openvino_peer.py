"""OpenVINO GenAI's `ContinuousBatchingPipeline` on one piece of work; runs in that peer's environment.

Options: `precision` of the arithmetic, `kv_precision` (f32, bf16, u8), `kv_blocks` (of 32 tokens, in all layers),
`eviction` (tokens that a sequence is held to while it decodes; null: all are kept), `step` (tokens computed at once;
null: as many as by default).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Answer, Tokens, Work, serve

# Beginning and end of a sequence that are never evicted: a block of sinks, and four of the latest tokens.
START_TOKENS, RECENT_TOKENS = 32, 128


def scheduler(work: Work) -> genai.SchedulerConfig:
    options = work.options
    config = genai.SchedulerConfig()
    config.num_kv_blocks = options["kv_blocks"]
    config.enable_prefix_caching = work.prefix_caching
    if options["step"] is not None:
        config.max_num_batched_tokens = options["step"]
    if options["eviction"] is not None:
        config.use_cache_eviction = True
        config.cache_eviction_config = genai.CacheEvictionConfig(
            START_TOKENS, RECENT_TOKENS, options["eviction"], genai.AggregationMode.NORM_SUM
        )
    return config


def answer(pipeline: genai.ContinuousBatchingPipeline, work: Work) -> Tokens:
    config = genai.GenerationConfig()
    config.max_new_tokens = work.new_tokens
    config.ignore_eos = not work.end_tokens
    config.stop_token_ids = set(work.end_tokens)
    config.do_sample = False
    tensors = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in work.prompts]
    results = pipeline.generate(tensors, [config] * len(tensors))
    return [list(result.m_generation_ids[0]) for result in results]


@contextmanager
def opened(work: Work) -> Iterator[Answer]:
    properties = {
        "INFERENCE_NUM_THREADS": work.threads,
        "INFERENCE_PRECISION_HINT": work.options["precision"],
        "KV_CACHE_PRECISION": work.options["kv_precision"],
    }
    pipeline = genai.ContinuousBatchingPipeline(work.model, scheduler(work), "CPU", properties)
    yield lambda asked: answer(pipeline, asked)


if __name__ == "__main__":
    serve(opened, packages=["openvino", "openvino-genai"])
