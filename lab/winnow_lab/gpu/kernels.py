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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from winnow_lab.bench.kernel import Operation, operations
from winnow_lab.bench.kernel_case import KernelCase
from winnow_lab.bench.kernel_config import KernelConfig
from winnow_lab.bench.limits import Limits
from winnow_lab.gpu.rows import PRODUCT, READ, milliseconds, put

if TYPE_CHECKING:
    from winnow.attention.triton.launch import Tuning

FORMATS = ("fp8_e4m3", "int8", "int4", "k=int8,v=int4")
SHAPES: dict[str, dict[str, Any]] = {
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
    from winnow.attention.triton.launch import Launch, tuning_for

    if device != "cpu":
        _compile(device)
    case = _case(device)
    found = _operations(case)
    for operation in found.values():
        _time(case, operation)
    for kv_format in FORMATS:
        other = _case(device, kv_cache_dtype=(kv_format,))
        decode = _operations(other)["decode"]
        _time(other, decode, f"decode, {kv_format}")
        for keys in (64, 128) if device != "cpu" else ():
            tuning = replace(tuning_for(128, torch.bfloat16, 90), decode=Launch(16, keys, 4, 2))
            _time(other, decode, f"decode, {kv_format}: keys {keys}", tuning)
    if device != "cpu":
        for name, shape in SHAPES.items():
            other = _case(device, **shape)
            _time(other, _operations(other)["decode"], f"decode, {name}")
    _sweep(case, list(_launches(device)))


def _operations(case: KernelCase) -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    for group in operations(case):
        found |= {each.name: each for each in group if each.name.startswith(("decode", "prefill"))}
        if "prefill" in found:
            break
    return found


def _sweep(case: KernelCase, launches: Sequence[tuple[str, str, "Tuning"]]) -> None:
    found = _operations(case)
    for kind, name, tuning in launches:
        try:
            _time(case, found[kind], f"{kind}: {name}", tuning)
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
    from winnow.attention.triton.launch import Launch, tuning_for

    base = tuning_for(128, torch.bfloat16, 90)
    decode, chunk = [], []
    for keys, warps, stages, split in itertools.product((64, 128), (4, 8), (2, 3), (512, 1024)):
        tuning = replace(base, decode=Launch(16, keys, warps, stages), min_split=split)
        decode.append((f"keys {keys}, warps {warps}, stages {stages}, min_split {split}", tuning))
    for queries, keys, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        tuning = replace(base, chunk=Launch(queries, keys, warps, stages))
        chunk.append((f"queries {queries}, keys {keys}, warps {warps}, stages {stages}", tuning))
    if device == "cpu":
        decode, chunk = decode[:1], chunk[:1]
    for pair in itertools.zip_longest(decode, chunk):
        yield from ((kind, *each) for kind, each in zip(("decode", "prefill"), pair, strict=True) if each)


def _case(device: str, **shape: Any) -> KernelCase:
    if device == "cpu":
        small: dict[str, Any] = {"batch": 2, "context": 32, "chunk": 8, "prefills": 1, "dtype": "float32"}
        small |= {"query_heads": 4, "kv_heads": 2, "head_dim": 16}
        small["kv_cache_dtype"] = shape.get("kv_cache_dtype", ("auto",))
        config = KernelConfig(device=device, **small)
    else:
        sizes = {"batch": 64, "context": 4096, "query_heads": 32, "kv_heads": 8, "head_dim": 128, **shape}
        config = KernelConfig(device=device, **sizes)
    return KernelCase.build(config, 1)


def _time(case: KernelCase, operation: Operation, name: str = "", tuning: "Tuning | None" = None) -> None:
    """Print milliseconds of a layer; two layers in turn, so that none is found in the cache."""
    from winnow.attention.triton import TritonBackend

    with torch.inference_mode():
        compute = operation.prepare(TritonBackend(tuning))

        def run() -> None:
            for layer in range(case.layers):
                compute(layer)

        spent = milliseconds(run, case.config.device) / case.layers
    work = {"flops": operation.flops} if operation.flops else {"bytes": operation.bytes_read}
    put(name or operation.name, spent, "ms", **work)
