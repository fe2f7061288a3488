"""Attention of sequences with one query each, their rows split over many programs (Flash-Decoding, Dao et al. 2023).

Splits are shorter where there are few rows, so a sequence's result may differ in the last bits from batch to batch.
"""

import triton
import triton.language as tl

from winnow.attention.triton.kernels.codec import load_keys, load_values
from winnow.attention.triton.kernels.rows import (
    LOG2E,
    find_slots,
    logits_of,
    online_softmax,
    row_length,
    sees,
)


@triton.jit
def sequence_of(row, index):
    """Return the index of the program's sequence in the batch; without `index` the leading ones, in order."""
    return row if index is None else tl.load(index + row)


@triton.jit
def split_size(length, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return KVs in each split of a row: a multiple of MIN_SPLIT that gives at most MAX_SPLITS splits."""
    return MIN_SPLIT * tl.maximum(1, tl.cdiv(length, MIN_SPLIT * MAX_SPLITS))


@triton.jit(do_not_specialize=["layer", "raw_stride"])
def attend_split(
    q, storage, position_pool, pages, page_table, lengths, slots, index, position, slopes, partial,
    statistics, raw, layer, q_token_stride, q_head_stride, raw_stride, scale, CACHE: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DOT: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute one split of one row for all query heads that share it. Grid (R, H, splits).

    Writes partial, float32 [R, Hq, splits, d], statistics, float32 [3, R, Hq, splits] (largest logit, sum of
    exponentials, KVs seen), and, if given, raw, float32 [R, Hq, raw_stride], the logits, to base 2.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = sequence_of(row, index)
    slot = tl.load(slots + sequence)
    length = row_length(lengths, slot, layer, head, CACHE)
    size = split_size(length, MIN_SPLIT, MAX_SPLITS)
    start = split * size
    if start >= length:
        return
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    query_head = head * GROUP + g
    real = g < GROUP
    q_at = q + sequence * q_token_stride + query_head[:, None] * q_head_stride + d[None, :]
    queries = tl.load(q_at, mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0.0).to(DOT)
    now = tl.load(position + sequence).to(tl.int32)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + query_head, mask=real, other=0.0)[:, None]
    # Index of each query head among R x Hq.
    mine = row.to(tl.int64) * (CACHE.kv_heads * GROUP) + query_head

    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    seen = tl.zeros([BLOCK_N], tl.float32)
    for first in range(start, tl.minimum(start + size, length), BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < length
        flat = find_slots(pages, page_table, slot, layer, head, first, length, CACHE, BLOCK_N)
        age = now - tl.load(position_pool + flat, mask=inside, other=0)
        visible = sees(now, age, inside, WINDOW)
        # Skip KVs outside the window. Without a window, loads of keys do not depend on positions.
        wanted = inside if WINDOW is None else visible
        keys, factor = load_keys(storage, flat, wanted, scale, KEY, HEAD_DIM, BLOCK_D, DOT)
        logits, unit = logits_of(
            queries, keys, factor, storage, flat, wanted, slope, age[None, :], KEY, SOFTCAP
        )
        logits = tl.where(visible[None, :], logits, float("-inf"))
        if raw is not None:
            tl.store(
                raw + mine[:, None] * raw_stride + n[None, :], logits * unit, real[:, None] & inside[None, :]
            )
        values, factor = load_values(storage, flat, wanted, VALUE, HEAD_DIM, BLOCK_D, DOT)
        row_max, row_sum, acc = online_softmax(logits, unit, values, factor, row_max, row_sum, acc)
        seen += visible.to(tl.float32)

    splits = tl.num_programs(2)
    mine = mine * splits + split
    plane = tl.num_programs(0).to(tl.int64) * (CACHE.kv_heads * GROUP) * splits
    tl.store(partial + mine[:, None] * HEAD_DIM + d[None, :], acc, real[:, None] & (d < HEAD_DIM)[None, :])
    tl.store(statistics + mine, row_max, real)
    tl.store(statistics + plane + mine, row_sum, real)
    tl.store(statistics + 2 * plane + mine, tl.zeros([BLOCK_G], tl.float32) + tl.sum(seen, axis=0), real)


@triton.jit(do_not_specialize=["layer", "splits"])
def merge_splits(
    partial, statistics, sinks, lengths, slots, index, out, merged, layer, splits, CACHE: tl.constexpr,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row and query head. Grid (R, Hq).

    Writes out, [T, Hq, d], for the sequences' tokens (zeros for an empty row), and, if given,
    merged, float32 [3, R, Hq], the statistics of whole rows, the sum including the sink.
    """
    row, query_head = tl.program_id(0), tl.program_id(1)
    sequence = sequence_of(row, index)
    slot = tl.load(slots + sequence)
    length = row_length(lengths, slot, layer, query_head // GROUP, CACHE)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    there = s < tl.cdiv(length, split_size(length, MIN_SPLIT, MAX_SPLITS))
    mine = row.to(tl.int64) * (CACHE.kv_heads * GROUP) + query_head
    at = mine * splits + s
    plane = tl.num_programs(0).to(tl.int64) * (CACHE.kv_heads * GROUP) * splits

    row_max = tl.load(statistics + at, mask=there, other=float("-inf"))
    top = tl.max(row_max, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + query_head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(row_max - base)
    row_sum = tl.sum(tl.load(statistics + plane + at, mask=there, other=0.0) * weight, axis=0)
    if sinks is not None:
        row_sum += tl.exp2(sink - base)
    parts = tl.load(
        partial + at[:, None] * HEAD_DIM + d[None, :],
        mask=there[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(parts * weight[:, None], axis=0) / tl.where(row_sum > 0, row_sum, 1.0)
    out_at = out + (sequence.to(tl.int64) * (CACHE.kv_heads * GROUP) + query_head) * HEAD_DIM + d
    tl.store(out_at, result.to(out.dtype.element_ty), d < HEAD_DIM)
    if merged is not None:
        seen = tl.sum(tl.load(statistics + 2 * plane + at, mask=there, other=0.0), axis=0)
        rows = tl.num_programs(0) * tl.num_programs(1)
        tl.store(merged + mine, base)
        tl.store(merged + rows + mine, row_sum)
        tl.store(merged + 2 * rows + mine, seen)
