"""Kernels that update accumulators. A program owns a block of KVs of a row and sums over the queries that count."""

import triton
import triton.language as tl

from winnow.attention.triton.kernels.codec import load_keys
from winnow.attention.triton.kernels.decode import sequence_of
from winnow.attention.triton.kernels.rows import find_slots, logits_of, row_length, sees

# Tolerance for KVs of average weight, since recomputed logits may differ in their last bits.
CLEARLY_BELOW: tl.constexpr = tl.constexpr(1.0 - 1e-5)


@triton.jit
def term_of(p, counted, seen, TERM: tl.constexpr):
    """Apply a term to probabilities before aggregation."""
    if TERM == "squared":
        p = p * p
    elif TERM == "below average":
        p = (counted & (p * seen < CLEARLY_BELOW)).to(tl.float32)
    return p


@triton.jit
def put(accumulator, flat, added, inside, REPLACE: tl.constexpr):
    """Add sums to the accumulators of a row's slots, or replace them."""
    if REPLACE:
        tl.store(accumulator + flat, added, inside)
    else:
        # Atomic, since sequences of one batch may share blocks.
        tl.atomic_add(accumulator + flat, added, inside, sem="relaxed")


@triton.jit(do_not_specialize=["layer", "raw_stride"])
def observe_decode(
    raw, statistics, position_pool, accumulator, pages, page_table, lengths, slots, index,
    position, layer, raw_stride, CACHE: tl.constexpr, GROUP: tl.constexpr, TERM: tl.constexpr,
    AGGREGATE: tl.constexpr, EXCLUDE_FIRST: tl.constexpr, REPLACE: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Observe one query per row, from the logits of `attend_split`. Grid (R, H, blocks of KVs).

    statistics: float32 [3, R, Hq], of `merge_splits`; accumulator: float32 [slots of the pool].
    """
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = sequence_of(row, index)
    slot = tl.load(slots + sequence)
    length = row_length(lengths, slot, layer, head, CACHE)
    if block * BLOCK_N >= length:
        return
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < length
    flat = find_slots(pages, page_table, slot, layer, head, block * BLOCK_N, length, CACHE, BLOCK_N)
    g = tl.arange(0, BLOCK_G)
    real = g < GROUP
    mine = row.to(tl.int64) * (CACHE.kv_heads * GROUP) + head * GROUP + g
    plane = tl.num_programs(0) * (CACHE.kv_heads * GROUP)
    row_max = tl.load(statistics + mine, mask=real, other=0.0)
    row_sum = tl.load(statistics + plane + mine, mask=real, other=1.0)
    seen = tl.load(statistics + 2 * plane + mine, mask=real, other=0.0)
    logits = tl.load(
        raw + mine[:, None] * raw_stride + n[None, :],
        mask=real[:, None] & inside[None, :],
        other=float("-inf"),
    )
    counted = logits > float("-inf")
    if EXCLUDE_FIRST > 0:
        age = tl.load(position + sequence).to(tl.int32) - tl.load(position_pool + flat, inside, other=0)
        counted = counted & (age >= EXCLUDE_FIRST)[None, :]
    p = tl.where(counted, tl.exp2(logits - row_max[:, None]) * (1.0 / row_sum)[:, None], 0.0)
    p = term_of(p, counted, seen[:, None], TERM)
    if AGGREGATE == "max":
        added = tl.max(p, axis=0)
    else:
        added = tl.sum(p, axis=0)
        if AGGREGATE == "mean":
            added = added / GROUP
    put(accumulator, flat, added, inside, REPLACE)


@triton.jit(do_not_specialize=["layer", "tokens", "longest"])
def observe_chunk(
    q, storage, position_pool, pages, page_table, lengths, slots, extents, index, position, slopes,
    statistics, target, layer, q_token_stride, q_head_stride, tokens, longest, scale, CACHE: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DOT: tl.constexpr, TERM: tl.constexpr, AGGREGATE: tl.constexpr,
    EXCLUDE_FIRST: tl.constexpr, REPLACE: tl.constexpr, SUMS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Recompute the probabilities of a chunk's queries that count. Grid (blocks of KVs, Hq / HEADS, R).

    A program aggregates HEADS query heads: the group, or one head. `statistics` come from `attend_chunk`.
    With SUMS, target is float32 [R, Hq / HEADS, longest] and receives the sums; entries past a row's length stay
    unchanged. Otherwise it is an accumulator of the pool, float32 [slots].
    """
    block, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = part * HEADS // GROUP
    sequence = sequence_of(row, index)
    slot = tl.load(slots + sequence)
    length = row_length(lengths, slot, layer, head, CACHE)
    if block * BLOCK_N >= length:
        return
    start = tl.load(extents + 3 * sequence)
    count = tl.load(extents + 3 * sequence + 1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = n < length
    flat = find_slots(pages, page_table, slot, layer, head, block * BLOCK_N, length, CACHE, BLOCK_N)
    positions = tl.load(position_pool + flat, mask=inside, other=0)
    keys, factor = load_keys(storage, flat, inside, scale, KEY, HEAD_DIM, BLOCK_D, DOT)
    plane = tokens.to(tl.int64) * (CACHE.kv_heads * GROUP)
    added = tl.zeros([BLOCK_N], tl.float32)
    # The chunk's own KVs are the last of the row: skip queries before the block's first KV.
    counting = tl.maximum(tl.load(extents + 3 * sequence + 2), 0)
    counting = tl.maximum(counting, block * BLOCK_N - (length - count))
    for first in range(counting, count, BLOCK_Q):
        query = first + tl.arange(0, BLOCK_Q)
        real = query < count
        token = (start + query).to(tl.int64)
        now = tl.load(position + token, mask=real, other=-1).to(tl.int32)
        age = now[:, None] - positions[None, :]
        counted = sees(now[:, None], age, inside[None, :], WINDOW) & (age >= EXCLUDE_FIRST)
        together = tl.zeros([BLOCK_Q, BLOCK_N], tl.float32)
        for h in range(HEADS):
            query_head = part * HEADS + h
            q_at = q + token[:, None] * q_token_stride + query_head * q_head_stride + d[None, :]
            queries = tl.load(q_at, mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0.0).to(DOT)
            slope = None
            if slopes is not None:
                slope = tl.load(slopes + query_head)
            logits, unit = logits_of(queries, keys, factor, storage, flat, inside, slope, age, KEY, SOFTCAP)
            mine = token * (CACHE.kv_heads * GROUP) + query_head
            row_max = tl.load(statistics + mine, mask=real, other=0.0)
            row_sum = tl.load(statistics + plane + mine, mask=real, other=1.0)
            seen = tl.load(statistics + 2 * plane + mine, mask=real, other=0.0)
            p = tl.where(counted, tl.exp2(logits * unit - row_max[:, None]) * (1.0 / row_sum)[:, None], 0.0)
            p = term_of(p, counted, seen[:, None], TERM)
            if AGGREGATE == "max":
                together = tl.maximum(together, p)
            else:
                together += p
        if AGGREGATE == "mean":
            together = together / HEADS
        added += tl.sum(together, axis=0)
    if SUMS:
        parts = tl.num_programs(1)
        tl.store(target + (row.to(tl.int64) * parts + part) * longest + n, added, inside)
    else:
        put(target, flat, added, inside, REPLACE)


@triton.jit(do_not_specialize=["layer", "longest"])
def replace_accumulators(
    values, accumulator, pages, page_table, lengths, slots, index, layer, longest, CACHE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write values, float32 [R, H, longest], to the slots of the rows. Grid (R, H, blocks of KVs)."""
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + sequence_of(row, index))
    length = row_length(lengths, slot, layer, head, CACHE)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < length
    flat = find_slots(pages, page_table, slot, layer, head, block * BLOCK_N, length, CACHE, BLOCK_N)
    value = tl.load(values + (row.to(tl.int64) * CACHE.kv_heads + head) * longest + n, mask=inside, other=0.0)
    put(accumulator, flat, value, inside, True)
