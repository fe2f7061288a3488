"""Compiles every kernel for a GPU that need not be there: python triton_compile.py 90 bfloat16 128 [float32]

Arguments: compute capability, the dtype of activations, head_dim, and the dtype of KVs where it is another. The
interpreter takes programs that the compiler refuses. Prints a line for each kernel, with its shared memory.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from winnow.attention.triton.kernels import chunk, decode, move, observer
from winnow.attention.triton.tuning import tuning_for

FORMATS = {torch.bfloat16: (tl.bfloat16, "*bf16"), torch.float32: (tl.float32, "*fp32")}
LAYOUT = {"LAYERS": 32, "KV_HEADS": 8, "BLOCK_SIZE": 16, "PAGE_ENTRIES": 16, "PAGES_PER_SEQ": 128}
GROUP = 4
# What kernels call their arguments says what they are; what is in none of these sets is int32.
OF_MODEL = {"q", "k", "v", "out", "sinks"}
OF_POOL = {"k_pool", "v_pool"}
INT64 = {"slots", "position", "token_slots", "tokens_after", "source", "words"}
INT32 = {"pages", "page_table", "lengths", "index", "position_pool", "extents", "tiles"}
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
}


def variants(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int
) -> Iterator[tuple[Any, dict[str, Any], int, int]]:
    """Each kernel, plain and with all that it may be asked for; constants, warps, stages."""
    products = torch.promote_types(dtype, kv_dtype)
    tuning = tuning_for(head_dim, products)
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}
    plain = {**LAYOUT, **sizes, "GROUP": GROUP, "WINDOW": None, "SOFTCAP": None, "DOT": FORMATS[products][0]}
    bent = {**plain, "WINDOW": 100, "SOFTCAP": 30.0}
    cut = {"MIN_SPLIT": tuning.min_split, "MAX_SPLITS": tuning.max_splits}

    tiles = {**cut, "BLOCK_G": 16, "BLOCK_N": tuning.decode.keys}
    launch = tuning.decode.num_warps, tuning.decode.num_stages
    yield decode.attend_split, {**plain, **tiles, "index": None, "raw": None}, *launch
    yield decode.attend_split, {**bent, **tiles}, *launch
    few = {name: LAYOUT[name] for name in ("LAYERS", "KV_HEADS")}
    yield decode.merge_splits, {**few, **sizes, **cut, "GROUP": GROUP, "BLOCK_S": 64}, 4, 3

    tiles = {"BLOCK_M": tuning.chunk.queries, "BLOCK_N": tuning.chunk.keys}
    launch = tuning.chunk.num_warps, tuning.chunk.num_stages
    nothing = dict.fromkeys(("sinks", "exact", "statistics"))
    yield chunk.attend_chunk, {**plain, **tiles, **nothing}, *launch
    yield chunk.attend_chunk, {**bent, **tiles}, *launch

    tiles = {"BLOCK_Q": tuning.observe.queries, "BLOCK_N": tuning.observe.keys}
    launch = tuning.observe.num_warps, tuning.observe.num_stages
    observer_args = {"AGGREGATE": "mean", "EXCLUDE_FIRST": 2, "REPLACE": False}
    added = {**observer_args, "TERM": "below average", "SUMS": False, "HEADS": GROUP, "exact": None}
    summed = {**observer_args, "TERM": "value aware", "SUMS": True, "HEADS": 1}
    yield observer.observe_chunk, {**plain, **tiles, **added}, *launch
    yield observer.observe_chunk, {**bent, **tiles, **summed}, *launch
    observer_args = {**observer_args, "TERM": "group squared", "AGGREGATE": "max"}
    yield (
        observer.observe_decode,
        {**LAYOUT, **observer_args, "GROUP": GROUP, "BLOCK_G": 4, "BLOCK_N": 128},
        4,
        3,
    )
    yield observer.replace_accumulators, {**LAYOUT, "BLOCK_N": 128}, 4, 3
    yield move.write_kvs, {**LAYOUT, **sizes, "NUM_ACCUMULATORS": 2, "BLOCK_H": 8}, 4, 3
    words = head_dim * kv_dtype.itemsize // 8
    of_pool = {
        "BLOCK_SIZE": 16,
        "BLOCK_WORDS": 32 * words,
        "FIELDS": ((0, words, words), (16 * words, words, words)),
    }
    yield move.move_kvs, {**of_pool, "NUM_ACCUMULATORS": 2, "BLOCK_N": 16}, 4, 3


def argument(kernel: Any, name: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """The type of a kernel's argument, in Triton's words."""
    if name in OF_MODEL or name in OF_POOL:
        return FORMATS[dtype if name in OF_MODEL else kv_dtype][1]
    if name in INT64 or (kernel is move.move_kvs and name == "target"):
        return "*i64"
    if name in INT32 or name in FLOAT32:
        return "*i32" if name in INT32 else "*fp32"
    return "fp32" if name == "scale" else "i32"


def compile_all(capability: int, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype) -> None:
    for kernel, constants, num_warps, num_stages in variants(dtype, kv_dtype, head_dim):
        names = kernel.arg_names
        signature = {
            name: "constexpr" if name in constants else argument(kernel, name, dtype, kv_dtype)
            for name in names
        }
        compiled = triton.compile(
            ASTSource(kernel, signature, {(names.index(name),): v for name, v in constants.items()}),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        print(kernel.__name__, compiled.metadata.shared)


if __name__ == "__main__":
    _, capability, dtype, head_dim, *kv_dtype = sys.argv
    formats = [getattr(torch, name) for name in (dtype, *kv_dtype)]
    compile_all(int(capability), formats[0], int(head_dim), formats[-1])
