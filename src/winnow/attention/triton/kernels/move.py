"""Kernels that write new KVs into the slots of their rows, and move KVs between slots."""

import triton
import triton.language as tl

from winnow.attention.triton.kernels.codec import field_at
from winnow.attention.triton.kernels.encode import store_vectors
from winnow.attention.triton.kernels.rows import find_blocks, row_length


@triton.jit
def write_token(
    token, k, v, storage, position_pool, accumulators, pages, page_table, lengths, token_slots,
    tokens_after, position, layer, k_token_stride, k_head_stride, v_token_stride, v_head_stride, pool_slots,
    CACHE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_ACCUMULATORS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store a token's KVs of all heads and zero their accumulators.

    accumulators: float32 [NUM_ACCUMULATORS, pool_slots]. Without `tokens_after` every token is the last of its row.
    """
    slot = tl.load(token_slots + token)
    head = tl.arange(0, BLOCK_H)
    # Count a token's place from the end of its row: rows may differ in length, but all end with this batch.
    n = row_length(lengths, slot, layer, head, CACHE) - 1
    if tokens_after is not None:
        n -= tl.load(tokens_after + token).to(tl.int32)
    inside = n >= 0  # the row of a padding sequence is empty
    block = find_blocks(pages, page_table, slot, layer, head, n // CACHE.block_size, inside, CACHE)
    flat = block * CACHE.block_size + n % CACHE.block_size
    key_at = k + token * k_token_stride + head * k_head_stride
    store_vectors(storage, flat, key_at, inside, KEY, HEAD_DIM, BLOCK_D)
    value_at = v + token * v_token_stride + head * v_head_stride
    store_vectors(storage, flat, value_at, inside, VALUE, HEAD_DIM, BLOCK_D)
    if KEY.bias > 0:
        bias_at = field_at(storage, flat, KEY.bias, 1, tl.float16, 2, KEY)
        tl.store(bias_at, tl.zeros([BLOCK_H], tl.float16), inside)
    now = tl.load(position + token).to(tl.int32)
    tl.store(position_pool + flat, tl.zeros([BLOCK_H], tl.int32) + now, inside)
    for number in tl.static_range(NUM_ACCUMULATORS):
        tl.store(accumulators + number * pool_slots + flat, tl.zeros([BLOCK_H], tl.float32), inside)


@triton.jit(do_not_specialize=["layer"])
def write_kvs(
    k, v, storage, position_pool, accumulators, pages, page_table, lengths, token_slots, tokens_after,
    position, layer, k_token_stride, k_head_stride, v_token_stride, v_head_stride, pool_slots,
    CACHE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_ACCUMULATORS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store one token's KVs of all heads and zero their accumulators. Grid (T)."""
    write_token(
        tl.program_id(0).to(tl.int64), k, v, storage, position_pool, accumulators, pages, page_table, lengths,
        token_slots, tokens_after, position, layer, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
        pool_slots, CACHE, KEY, VALUE, HEAD_DIM, NUM_ACCUMULATORS, BLOCK_H, BLOCK_D,
    )  # fmt: skip


@triton.jit
def copy_words(source, target, inside, SIZE: tl.constexpr, BLOCK_W: tl.constexpr):
    """Copy SIZE words from and to each of the pointers [BLOCK_N], where `inside`."""
    w = tl.arange(0, BLOCK_W)
    shown = inside[:, None] & (w < SIZE)[None, :]
    tl.store(target[:, None] + w[None, :], tl.load(source[:, None] + w[None, :], mask=shown), shown)


@triton.jit(do_not_specialize=["moves"])
def move_kvs(
    words, position_pool, accumulators, source, target, moves, pool_slots, BLOCK_SIZE: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, FIELDS: tl.constexpr, NUM_ACCUMULATORS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Move KVs between slots, whatever their codec; source and target int64 [moves]. Grid (blocks of moves).

    words: the pool's storage as integers, BLOCK_WORDS in a block. FIELDS: for each field its offset in a block in
    words, its words in a slot, and the next power of two of the latter.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < moves
    old = tl.load(source + n, mask=inside, other=0)
    new = tl.load(target + n, mask=inside, other=0)
    old_block = words + old // BLOCK_SIZE * BLOCK_WORDS
    new_block = words + new // BLOCK_SIZE * BLOCK_WORDS
    for number in tl.static_range(len(FIELDS)):
        old_at = old_block + FIELDS[number][0] + old % BLOCK_SIZE * FIELDS[number][1]
        new_at = new_block + FIELDS[number][0] + new % BLOCK_SIZE * FIELDS[number][1]
        copy_words(old_at, new_at, inside, FIELDS[number][1], FIELDS[number][2])
    tl.store(position_pool + new, tl.load(position_pool + old, mask=inside), inside)
    for number in tl.static_range(NUM_ACCUMULATORS):
        plane = number * pool_slots
        tl.store(accumulators + plane + new, tl.load(accumulators + plane + old, mask=inside), inside)
