"""Limits of the card, attention of Triton's kernels beside them, and a sweep of their launches."""

import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from benchmarks.gpu.rows import PRODUCT, READ, milliseconds, put
from winnow.attention import AttentionObserver, AttentionSpec
from winnow.bench.kernel import DECODE_OBSERVED, WINDOW, WINDOW_OBSERVED, attention_flops
from winnow.bench.kernel_case import KernelCase
from winnow.bench.kernel_config import KernelConfig
from winnow.bench.limits import Limits

if TYPE_CHECKING:
    from winnow.attention import Spans
    from winnow.attention.triton.tuning import Tuning

FORMATS = ("fp8_e4m3", "int8", "int4", "k=int8,v=int4")
SHAPES = {
    "64 x 4,096, rows uneven": {"uneven": True},
    "16 x 4,096": {"batch": 16},
    "8 x 32,768": {"batch": 8, "context": 32768},
    "head_dim 64": {"head_dim": 64},
}
MOST_COMPILERS, COMPILE_SECONDS = 8, 30


def limits(device: str) -> None:
    """Copying, reading, a product, and SDPA over contiguous KVs: what paged attention is held beside."""
    found = Limits.measure(torch.bfloat16, torch.device(device))
    put(READ, found.read / 1e12, "TB/s")
    put("copy", found.copy / 1e12, "TB/s")
    put(PRODUCT, found.matmul / 1e12, "TFLOP/s")
    batch, context = (64, 4096) if device != "cpu" else (2, 64)
    q = torch.randn(batch, 32, 1, 128, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, 8, context, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    spent = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), device)
    put(f"SDPA, contiguous, {batch} x {context:,}", spent, "ms", bytes=k.nbytes + v.nbytes)


def attention(device: str) -> None:
    """One layer's attention with the table's launches: formats, observers, shapes; then a sweep."""
    if device != "cpu":
        _compile(device)
    case = _case(device)
    _decode(case, "decode 64 x 4,096")
    for name, observer in DECODE_OBSERVED.items():
        _decode(case, f"decode, observing {name}", observer)
    _prefill(case, "prefill 4 x 512 in 4,096")
    _prefill(case, f"prefill, window {WINDOW} observed", WINDOW_OBSERVED)
    for kv_format in FORMATS:
        _decode(_case(device, kv_cache_dtype=kv_format), f"decode, {kv_format}")
    if device != "cpu":
        for name, shape in SHAPES.items():
            _decode(_case(device, **shape), f"decode, {name}")
    _sweep(case, list(_launches(device)))


def _sweep(case: KernelCase, launches: Sequence[tuple[str, str, "Tuning"]]) -> None:
    for kind, name, tuning in launches:
        try:
            (_decode if kind == "decode" else _prefill)(case, f"{kind}: {name}", tuning=tuning)
        except Exception as error:  # a launch that does not fit the card's shared memory
            print(f"{kind} {name}: {str(error).splitlines()[0]}", file=sys.stderr)


def _compile(device: str) -> None:
    """Compile the sweep's launches in several processes: one by one they take longer than all measurements."""
    parts = max(min(MOST_COMPILERS, (os.cpu_count() or 1) // 2), 1)
    pool = ProcessPoolExecutor(parts, multiprocessing.get_context("spawn"))
    wait([pool.submit(warm, device, part, parts) for part in range(parts)], timeout=COMPILE_SECONDS)
    pool.shutdown(wait=False, cancel_futures=True)


def warm(device: str, part: int, parts: int) -> None:
    """Run every `parts`-th launch of the sweep on fewer sequences of the same shapes, and print nothing."""
    with redirect_stdout(StringIO()):
        _sweep(_case(device, batch=16), list(_launches(device))[part::parts])


def _launches(device: str) -> Iterator[tuple[str, str, "Tuning"]]:
    """Launches around the table's, those of decoding and of prefill in turn: a sweep may be cut off."""
    from winnow.attention.triton.tuning import Launch, tuning_for

    base = tuning_for(128, torch.bfloat16, 90)
    decode = [
        (
            f"keys {keys}, warps {warps}, stages {stages}, min_split {split}",
            replace(base, decode=Launch(16, keys, warps, stages), min_split=split),
        )
        for keys, warps, stages, split in itertools.product((64, 128), (4, 8), (2, 3), (512, 1024))
    ]
    chunk = [
        (
            f"queries {queries}, keys {keys}, warps {warps}, stages {stages}",
            replace(base, chunk=Launch(queries, keys, warps, stages)),
        )
        for queries, keys, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
    ]
    if device == "cpu":
        decode, chunk = decode[:1], chunk[:1]
    for pair in itertools.zip_longest(decode, chunk):
        yield from ((kind, *each) for kind, each in zip(("decode", "prefill"), pair, strict=True) if each)


def _case(device: str, **shape: object) -> KernelCase:
    if device == "cpu":
        small = {
            "batch": 2,
            "context": 32,
            "query_heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "chunk": 8,
            "prefills": 1,
        }
        kv_format = shape.get("kv_cache_dtype", "auto")
        config = KernelConfig(device=device, dtype="float32", kv_cache_dtype=str(kv_format), **small)  # type: ignore[arg-type]
    else:
        sizes = {"batch": 64, "context": 4096, "query_heads": 32, "kv_heads": 8, "head_dim": 128, **shape}
        config = KernelConfig(device=device, **sizes)  # type: ignore[arg-type]
    return KernelCase.build(config, 1)


def _decode(
    case: KernelCase, name: str, observe: AttentionObserver | None = None, tuning: "Tuning | None" = None
) -> None:
    spans = case.spans(case.config.batch, 0, observe)
    lengths = case.cache.tables.host_lengths[spans.slots]
    read = float(lengths.sum()) / case.layers * case.kv_bytes
    put(name, _attend(case, spans, tuning), "ms", bytes=read)


def _prefill(
    case: KernelCase, name: str, observe: AttentionObserver | None = None, tuning: "Tuning | None" = None
) -> None:
    chunks = case.config.prefill_batch
    spans = case.spans(0, chunks, observe, WINDOW if observe else 0)
    put(name, _attend(case, spans, tuning), "ms", flops=attention_flops(case, spans))


def _attend(case: KernelCase, spans: "Spans", tuning: "Tuning | None") -> float:
    """Milliseconds of a layer; two layers in turn, so that none is found in the cache."""
    from winnow.attention.triton import TritonBackend

    q = case.q[: int(spans.counts.sum())]
    spec = AttentionSpec(case.config.head_dim**-0.5)
    with torch.inference_mode():
        step = TritonBackend(tuning).prepare(case.cache, spans)
        layers = range(case.layers)

        def run() -> None:
            for layer in layers:
                step.attend(layer, q, spec)

        return milliseconds(run, case.config.device) / case.layers
