"""Whole models of random weights: tokens a second by policy, a decode step and its profile."""

import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from winnow import LLM
from winnow_lab.bench.answering import fixed_length
from winnow_lab.gpu.rows import Work, put

ALL = "full cache, memory for all"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    ALL: {},
    "full cache": {},
    "batch-max, 4x": {"eviction": "batch-max", "compression": 4},
    "kv-compress-pd, 4x": {"eviction": "kv-compress-pd", "compression": 4},
    "fp8 KVs": {"kv_cache_dtype": "fp8_e4m3"},
}
if find_spec("humming") is not None:
    CONFIGURATIONS |= {f"{form} weights": {"weight_dtype": form} for form in ("fp8", "int8", "int4")}
PROFILED_STEPS = 6
KERNELS = 16


def measure(work: Work, device: str, *, every: bool) -> None:
    """Rows of a model; `every` configuration, or the full cache alone."""
    path, prompts = str(work.directory()), work.prompts()
    for name, options in CONFIGURATIONS.items() if every else [(ALL, {})]:
        if "weight_dtype" in options and device == "cpu":
            continue
        sequences = work.sequences if name == ALL else work.fitting
        tokens = (work.prompt + work.new) * (sequences + (name == ALL))
        llm = LLM(
            model=path,
            load_format="dummy",
            dtype="bfloat16",
            device=device,
            kv_memory=max(int(1.02 * tokens * work.kv_bytes), 2**20),
            verify_model=False,
            enable_prefix_caching=False,  # the prompts come several times
            **options,
        )
        with llm:
            llm.generate(prompts[:2], fixed_length(8))
            start = time.perf_counter()
            llm.generate(prompts, fixed_length(work.new))
            seconds = time.perf_counter() - start
            put(
                name, work.sequences * work.new / seconds, "tokens/s", preemptions=llm.stats().num_preemptions
            )
            if name == ALL:
                _step(llm, work, prompts)
                _prefill(llm, work, prompts)
                if device != "cpu":
                    _profile(llm, prompts)


def _decoding(llm: LLM, prompts: list[list[int]], tokens: int) -> Iterator[float]:
    for prompt in prompts:
        llm.submit(prompt, fixed_length(tokens))
    total = sum(map(len, prompts)) + llm.stats().prompt_tokens
    while llm.has_unfinished and llm.stats().prompt_tokens < total:
        llm.step()
    while llm.has_unfinished:
        start = time.perf_counter()
        llm.step()
        yield time.perf_counter() - start


def _step(llm: LLM, work: Work, prompts: list[list[int]]) -> None:
    count = min(48, work.new)
    spent = sorted(list(_decoding(llm, prompts, count))[: max(count // 2, 1)])
    read = work.weight_bytes + work.kv_bytes * len(prompts) * (work.prompt + count // 2)
    put(f"decode step of {len(prompts)}", 1e3 * spent[len(spent) // 2], "ms", bytes=read)


def _prefill(llm: LLM, work: Work, prompts: list[list[int]]) -> None:
    """All prompts to their first token; products alone are counted."""
    start = time.perf_counter()
    llm.generate(prompts, fixed_length(1))
    tokens = len(prompts) * work.prompt
    head = 2 * work.values["hidden_size"] * work.values["vocab_size"]
    flops = tokens * (work.weight_bytes - head)
    put(f"prefill of {tokens:,} tokens", 1e3 * (time.perf_counter() - start), "ms", flops=flops)


def _profile(llm: LLM, prompts: list[list[int]]) -> None:
    from torch.profiler import ProfilerActivity, profile

    steps = _decoding(llm, prompts, 40)
    for _ in range(12):
        next(steps)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED_STEPS):
            next(steps)
        torch.cuda.synchronize()
    spent = sorted(found.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in spent)
    launches = sum(each.count for each in spent if each.self_device_time_total) / PROFILED_STEPS
    put("profile: device time of a step", total / PROFILED_STEPS / 1e3, "ms", launches=launches)
    for each in spent[:KERNELS]:
        put(
            f"  {each.key[:60]}",
            each.self_device_time_total / PROFILED_STEPS / 1e3,
            "ms",
            launches=each.count,
        )
    for _ in steps:
        pass
