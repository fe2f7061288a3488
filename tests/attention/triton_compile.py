"""Compile every kernel for a GPU that need not be there: `python triton_compile.py 90 bfloat16 128 [float32]`.

Arguments: compute capability, the dtype of activations, head_dim, the format of KVs where it is another, and names of
kernels where not all are wanted, `attend_chunk/window` with a window. The interpreter takes programs that the compiler
refuses. Prints a line of JSON for each kernel: its tile, shared memory, and what the assembler made of it.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from winnow.attention.triton.kernels import chunk, decode, key_difference, move, observer, rotate
from winnow.attention.triton.key_difference import Turn
from winnow.attention.triton.launch import CacheShape, product_dtype, tuning_for
from winnow.attention.triton.side_format import Window, side_formats
from winnow.cache import CacheLayout, KVPool, PairCodec
from winnow.cache.codec import make_codec
from winnow.models.fast.fused import triton_passes
from winnow.sampling import triton_kernels
from winnow.values.kv_dtype import KVDtype

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FORMATS = {
    torch.bfloat16: (tl.bfloat16, "*bf16"),
    torch.float32: (tl.float32, "*fp32"),
    torch.float16: (tl.float16, "*fp16"),
}
BLOCK_SIZE = 16
LAYOUT = {"CACHE": CacheShape(layers=32, kv_heads=8, block_size=BLOCK_SIZE, pages_per_seq=128)}
GROUP = 4
WORDS = {torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8"}
# What kernels call their arguments says what they are; what is in none of these sets is int32.
OF_MODEL = {"q", "k", "v", "out", "sinks", "heads", "cos", "sin", "query_norm", "key_norm"}
OF_MODEL |= {"x", "add", "to", "weight", "gate_up"}
INT64 = {"slots", "position", "token_slots", "tokens_after", "source", "chosen", "top_k"}
INT32 = {
    "pages",
    "page_table",
    "lengths",
    "index",
    "position_pool",
    "extents",
    "tiles",
    "positions",
    "counted",
}
FLOAT32 = {
    "partial",
    "statistics",
    "raw",
    "merged",
    "exact",
    "accumulators",
    "accumulator",
    "target",
    "values",
    "logits",
    "sums",
    "cosines",
    "sines",
    "score",
    "slopes",
}


def variants(
    dtype: torch.dtype, codec: PairCodec, head_dim: int, capability: int
) -> Iterator[tuple[Any, dict[str, Any], int, int]]:
    """Each kernel, plain and with all that it may be asked for; constants, warps, stages."""
    pool = KVPool(CacheLayout.even(32, 8, head_dim, BLOCK_SIZE, codec), 1)
    products = product_dtype(torch.empty(0, dtype=dtype), pool.kinds[0].kind.codec)
    tuning = tuning_for(triton.next_power_of_2(head_dim), products, capability)
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}
    sizes_of_kvs = {**sizes, **side_formats(pool.kinds[0].kind)}
    plain = {
        **LAYOUT,
        **sizes_of_kvs,
        "GROUP": GROUP,
        "WINDOW": None,
        "SOFTCAP": None,
        "DOT": FORMATS[products][0],
    }
    bent = {**plain, "WINDOW": Window(100, chunked=False), "SOFTCAP": 30.0}
    chunked = {**bent, "WINDOW": Window(100, chunked=True)}
    cut = {"MIN_SPLIT": tuning.min_split, "MAX_SPLITS": tuning.max_splits}

    tiles = {**cut, "BLOCK_G": 16, "BLOCK_N": tuning.decode.keys}
    launch = tuning.decode.num_warps, tuning.decode.num_stages
    yield decode.attend_split, {**plain, **tiles, "index": None, "raw": None, "slopes": None}, *launch
    yield decode.attend_split, {**bent, **tiles}, *launch
    yield decode.attend_split, {**chunked, **tiles}, *launch
    yield decode.merge_splits, {**LAYOUT, **sizes, **cut, "GROUP": GROUP, "BLOCK_S": 64}, 4, 3

    tiles = {"BLOCK_M": tuning.chunk.queries, "BLOCK_N": tuning.chunk.keys}
    launch = tuning.chunk.num_warps, tuning.chunk.num_stages
    nothing = dict.fromkeys(("slopes", "sinks", "statistics"))
    yield chunk.attend_chunk, {**plain, **tiles, **nothing}, *launch
    yield chunk.attend_chunk, {**bent, **tiles}, *launch
    yield chunk.attend_chunk, {**chunked, **tiles}, *launch

    tiles = {"BLOCK_Q": tuning.observe.queries, "BLOCK_N": tuning.observe.keys}
    launch = tuning.observe.num_warps, tuning.observe.num_stages
    observer_args = {"AGGREGATE": "mean", "EXCLUDE_FIRST": 2, "REPLACE": False}
    added = {**observer_args, "TERM": "below average", "SUMS": False, "HEADS": GROUP, "slopes": None}
    summed = {**observer_args, "TERM": "squared", "SUMS": True, "HEADS": 1}
    yield observer.observe_chunk, {**plain, **tiles, **added}, *launch
    yield observer.observe_chunk, {**bent, **tiles, **summed}, *launch
    observed = {**LAYOUT, **observer_args, "GROUP": GROUP, "BLOCK_G": 4, "BLOCK_N": 128}
    yield observer.observe_decode, {**observed, "TERM": "squared", "AGGREGATE": "max"}, 4, 3
    yield observer.replace_accumulators, {**LAYOUT, "BLOCK_N": 128}, 4, 3
    rotation = {
        "QUERY_HEADS": 32,
        "HALF": head_dim // 2,
        "QUERY_ONE_PLUS": False,
        "KEY_ONE_PLUS": False,
        "BLOCK": triton.next_power_of_2(head_dim // 2),
        "REST": 1,
    }
    storing = {**LAYOUT, **sizes_of_kvs, "NUM_ACCUMULATORS": 2, "BLOCK_H": 8}
    yield move.write_kvs, storing, 4, 3
    yield rotate.rotate_and_write_heads, {**storing, **rotation, "query_norm": None, "key_norm": None}, 4, 3
    yield rotate.rotate_and_write_heads, {**storing, **rotation}, 4, 3
    rotation |= {"HEAD_DIM": head_dim}
    yield triton_passes.rotate_heads, {**rotation, "query_norm": None, "key_norm": None}, 1, 3
    yield triton_passes.rotate_heads, rotation, 1, 3
    yield triton_passes.rms_norm_rows, {"ONE_PLUS": False, "BLOCK": 4096, "add": None}, 8, 3
    for one_plus in (False, True):
        yield triton_passes.rms_norm_rows, {"ONE_PLUS": one_plus, "BLOCK": 4096}, 8, 3
        yield triton_passes.add_normed_rows, {"ONE_PLUS": one_plus, "BLOCK": 4096}, 8, 3
        yield triton_passes.gate_rows, {"GELU": one_plus, "BLOCK": 1024}, 4, 3
    of_pool = {
        "BLOCK_SIZE": BLOCK_SIZE,
        "BLOCK_WORDS": pool.of_layer(-1).words.shape[1],
        "FIELDS": tuple(
            (at, size, triton.next_power_of_2(size)) for at, size in pool.of_layer(-1).fields_in_words
        ),
    }
    yield move.move_kvs, {**of_pool, "NUM_ACCUMULATORS": 2, "BLOCK_N": 16}, 4, 3
    half = head_dim // 2
    comparing = {
        "TURN": Turn(half, 0, False, half, triton.next_power_of_2(half), 1),
        "KEY": plain["KEY"],
        "KV_HEADS": 8,
        "TILE": 256,
        "BLOCK_N": 4096 // sizes["BLOCK_D"],
    }
    yield key_difference.compare_keys, {**comparing, "sums": None}, 4, 3
    yield key_difference.compare_keys, {**comparing, "counted": None}, 4, 3
    yield triton_kernels.argmax_rows, {"FAULT": -1, "BLOCK": 4096}, 8, 3
    yield triton_kernels.keep_top_rows, {"BLOCK": 4096}, 16, 3


def argument(kernel: Any, name: str, dtype: torch.dtype, word: torch.dtype) -> str:
    """The type of a kernel's argument, in Triton's words."""
    if name in OF_MODEL:
        return FORMATS[dtype][1]
    if name in ("storage", "top_p"):
        return "*u8" if name == "storage" else "*fp64"
    if name == "words":
        return WORDS[word]
    if name in INT64 or (kernel is move.move_kvs and name == "target"):
        return "*i64"
    if name in INT32 or name in FLOAT32:
        return "*i32" if name in INT32 else "*fp32"
    return "fp32" if name in ("scale", "eps", "query_eps", "key_eps") else "i32"


def alignment(kernel: Any, name: str, kind: str) -> bool:
    """Whether the JIT finds this argument to be a multiple of 16: memory that torch gave, and strides of heads."""
    return kind.startswith("*") or name.endswith(("token_stride", "head_stride", "row_stride"))


def compile_all(
    capability: int, dtype: torch.dtype, head_dim: int, codec: PairCodec, only: frozenset[str]
) -> Iterator[dict[str, Any]]:
    """Each kernel's name, tile and resources; `only`: names of kernels; empty: all."""
    word = KVPool(CacheLayout.even(1, 1, head_dim, BLOCK_SIZE, codec), 1).kinds[0].words.dtype
    for kernel, constants, num_warps, num_stages in variants(dtype, codec, head_dim, capability):
        label = kernel.__name__ + "/window" * (constants.get("WINDOW") is not None)
        if only and label not in only:
            continue
        names = kernel.arg_names
        signature = {
            name: "constexpr" if name in constants else argument(kernel, name, dtype, word) for name in names
        }
        compiled = triton.compile(
            ASTSource(
                kernel,
                signature,
                {(names.index(name),): v for name, v in constants.items()},
                {
                    (names.index(name),): [["tt.divisibility", 16]]
                    for name, kind in signature.items()
                    if alignment(kernel, name, kind)
                },
            ),
            target=GPUTarget("cuda", capability, 32),
            options={
                "num_warps": num_warps,
                "num_stages": num_stages,
                "enable_fp_fusion": kernel not in (move.write_kvs, rotate.rotate_and_write_heads),
            },
        )
        tile = [constants[name] for name in ("BLOCK_M", "BLOCK_G", "BLOCK_Q", "BLOCK_N") if name in constants]
        yield {
            "kernel": label,
            "tile": tile,
            "warps": num_warps,
            "shared": compiled.metadata.shared,
            **resources(compiled.asm["cubin"]),
        }


def resources(cubin: bytes) -> dict[str, Any]:
    """Registers of a thread, bytes of its stack (spills), and instructions: all, and of its long loops."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(
                [str(DISASSEMBLER), option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    places = [int(at, 16) for at in re.findall(r"/\*([0-9a-f]{4,})\*/ ", code)]
    jumps = [
        (int(target, 16), int(at, 16))
        for at, target in re.findall(r"/\*([0-9a-f]{4,})\*/ [^;]*BRA(?:\.U)?[^;]* 0x([0-9a-f]+)", code)
    ]
    loops = [sum(target <= at <= end for at in places) for target, end in jumps if target < end]
    loops = [size for size in loops if size > 100]
    return {"registers": int(found[1]), "stack": int(found[2]), "instructions": len(places), "loops": loops}


if __name__ == "__main__":
    _, capability, dtype, head_dim, *rest = sys.argv
    codec = make_codec(KVDtype.parse((rest or [dtype])[0]), rotate="kv")
    for line in compile_all(
        int(capability), getattr(torch, dtype), int(head_dim), codec, frozenset(rest[1:])
    ):
        print(json.dumps(line), flush=True)
