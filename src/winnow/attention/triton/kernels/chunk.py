"""Attention of prefill chunks: a tile of queries against the whole row of its sequence (FlashAttention-2)."""

import triton
import triton.language as tl

from winnow.attention.triton.kernels.codec import load_keys, load_values
from winnow.attention.triton.kernels.rows import (
    LOG2E,
    find_slots,
    logits_of,
    online_softmax,
    reach,
    row_length,
    sees,
)


@triton.jit
def attend_tile(
    queries, slope, now, earliest, row_max, row_sum, acc, seen, storage, position_pool, pages, page_table,
    slot, layer, head, first, end, scale, CACHE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update the online softmax of a tile of queries by the KVs of a row from `first` on; MASKED: not all see all."""
    flat = find_slots(pages, page_table, slot, layer, head, first, end, CACHE, BLOCK_N)
    if MASKED:
        inside = first + tl.arange(0, BLOCK_N) < end
        positions = tl.load(position_pool + flat, mask=inside, other=0)
        wanted = inside
        if WINDOW is not None:  # skip KVs that no query of the tile sees
            wanted = inside & (positions > earliest - reach(earliest, WINDOW))
        age = now[:, None] - positions[None, :]
    else:
        wanted = tl.full([BLOCK_N], True, tl.int1)
        age = None
    keys, factor = load_keys(storage, flat, wanted, scale, KEY, HEAD_DIM, BLOCK_D, DOT)
    logits, unit = logits_of(queries, keys, factor, storage, flat, wanted, slope, age, KEY, SOFTCAP)
    if MASKED:
        visible = sees(now[:, None], age, inside[None, :], WINDOW)
        logits = tl.where(visible, logits, float("-inf"))
        seen += tl.sum(visible.to(tl.float32), axis=1)
    else:
        seen += BLOCK_N
    values, value_factor = load_values(storage, flat, wanted, VALUE, HEAD_DIM, BLOCK_D, DOT)
    row_max, row_sum, acc = online_softmax(logits, unit, values, value_factor, row_max, row_sum, acc)
    return row_max, row_sum, acc, seen


@triton.jit(do_not_specialize=["layer", "tokens"])
def attend_chunk(
    q, storage, position_pool, pages, page_table, lengths, slots, extents, tiles, position, slopes, sinks,
    out, statistics, layer, q_token_stride, q_head_stride, tokens, scale, CACHE: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute tiles of BLOCK_M rows, which are tokens times query heads of a group. Grid (tiles, H).

    tiles: int32 [tiles, 2], sequence and first token within the chunk; extents: see `Chunks.extents`. Writes out
    [T, Hq, d]; if given, `statistics`, float32 [3, T, Hq], receives the largest logit,
    to base 2, the sum of exponentials (sink included) and the number of KVs seen.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    first_query = tl.load(tiles + 2 * tile + 1)
    start = tl.load(extents + 3 * sequence)
    count = tl.load(extents + 3 * sequence + 1)
    slot = tl.load(slots + sequence)
    length = row_length(lengths, slot, layer, head, CACHE)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    queries_per_tile: tl.constexpr = BLOCK_M // GROUP
    real = (m // GROUP < queries_per_tile) & (first_query + m // GROUP < count)
    token = (start + first_query + m // GROUP).to(tl.int64)
    query_head = head * GROUP + m % GROUP
    shown = real[:, None] & (d < HEAD_DIM)[None, :]
    q_at = q + token[:, None] * q_token_stride + query_head[:, None] * q_head_stride + d[None, :]
    queries = tl.load(q_at, mask=shown, other=0.0).to(DOT)
    # Padding rows get position -1 and see nothing.
    now = tl.load(position + token, mask=real, other=-1).to(tl.int32)
    earliest = tl.load(position + start + first_query, mask=first_query < count, other=0).to(tl.int32)

    slope = None
    if slopes is not None:
        slope = tl.load(slopes + query_head, mask=real, other=0.0)[:, None]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    seen = tl.zeros([BLOCK_M], tl.float32)
    # A chunk's own KVs are the last of its row, in order: skip those after the tile's last query.
    end = length - count + tl.minimum(first_query + queries_per_tile, count)
    # KVs older than the chunk are visible to all of its queries, unless there is a window: whole tiles of them need no
    # mask, nor positions.
    masked = 0
    if WINDOW is None and slopes is None:
        masked = tl.maximum(length - count, 0) // BLOCK_N * BLOCK_N  # rows that only fill a batch are empty
        for first in range(0, masked, BLOCK_N):
            row_max, row_sum, acc, seen = attend_tile(
                queries, slope, now, earliest, row_max, row_sum, acc, seen,
                storage, position_pool, pages, page_table, slot, layer, head, first, end, scale,
                CACHE, KEY, VALUE, HEAD_DIM, WINDOW, SOFTCAP, DOT, BLOCK_N, BLOCK_D, False,
            )  # fmt: skip
    for first in range(masked, end, BLOCK_N):
        row_max, row_sum, acc, seen = attend_tile(
            queries, slope, now, earliest, row_max, row_sum, acc, seen,
            storage, position_pool, pages, page_table, slot, layer, head, first, end, scale,
            CACHE, KEY, VALUE, HEAD_DIM, WINDOW, SOFTCAP, DOT, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip

    if sinks is not None:
        sink = tl.load(sinks + query_head, mask=real, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(row_max, sink)
        rescale = tl.exp2(row_max - top)
        row_sum = row_sum * rescale + tl.exp2(sink - top)
        acc = acc * rescale[:, None]
        row_max = top
    result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    mine = token * (CACHE.kv_heads * GROUP) + query_head
    out_at = mine[:, None] * HEAD_DIM + d[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), shown)
    if statistics is not None:
        plane = tokens.to(tl.int64) * (CACHE.kv_heads * GROUP)
        tl.store(statistics + mine, row_max, real)
        tl.store(statistics + plane + mine, row_sum, real)
        tl.store(statistics + 2 * plane + mine, seen, real)
