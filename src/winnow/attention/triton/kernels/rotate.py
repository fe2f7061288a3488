"""Kernels that norm and rotate the heads of new tokens, and store their KVs with that."""

import triton
import triton.language as tl

from winnow.attention.triton.kernels.move import write_token


@triton.jit
def part_of(pointer, at, inside):
    """Load a part of a vector as float32; zeros outside."""
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def weighted(value, weight, column, inside, ONE_PLUS: tl.constexpr):
    """Return values times a norm's weights."""
    factor = part_of(weight, column, inside)
    if ONE_PLUS:
        factor += 1
    return value * factor


@triton.jit
def rotate_vectors(
    start, shown, token, cos, sin, norm, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    ONE_PLUS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the vectors at pointers [N] in place, where `shown`, dimension i with i + HALF.

    A thread holds both dimensions of a pair: no other reads what it overwrites.
    """
    i, rest = tl.arange(0, BLOCK)[None, :], 2 * HALF + tl.arange(0, REST)[None, :]
    paired, beyond = shown[:, None] & (i < HALF), shown[:, None] & (rest < HEAD_DIM)
    first_at, last_at = start[:, None] + i, start[:, None] + rest
    first = part_of(first_at, 0, paired)
    second = part_of(first_at, HALF, paired)
    if norm is not None:
        last = part_of(last_at, 0, beyond)
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(last * last, axis=1)
        scale = (1 / tl.sqrt(square / HEAD_DIM + eps))[:, None]
        first = weighted(first * scale, norm, i, i < HALF, ONE_PLUS)
        second = weighted(second * scale, norm, HALF + i, i < HALF, ONE_PLUS)
        last = weighted(last * scale, norm, rest, rest < HEAD_DIM, ONE_PLUS)
        tl.store(last_at, last.to(start.dtype.element_ty), mask=beyond)
    at = token * (2 * HALF) + i
    turned = first * part_of(cos, at, i < HALF) - second * part_of(sin, at, i < HALF)
    after = second * part_of(cos, at + HALF, i < HALF) + first * part_of(sin, at + HALF, i < HALF)
    tl.store(first_at, turned.to(start.dtype.element_ty), mask=paired)
    tl.store(first_at + HALF, after.to(start.dtype.element_ty), mask=paired)


@triton.jit(do_not_specialize=["layer"])
def rotate_and_write_heads(
    heads, row_stride, cos, sin, query_norm, key_norm, query_eps, key_eps, storage, position_pool,
    accumulators, pages, page_table, lengths, token_slots, tokens_after, position, layer, pool_slots,
    QUERY_HEADS: tl.constexpr, HALF: tl.constexpr, QUERY_ONE_PLUS: tl.constexpr, KEY_ONE_PLUS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, CACHE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_ACCUMULATORS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a token's queries and keys in place, and store its KVs. Grid (T, 1 + tiles of query heads).

    The first program of a token has its keys and values, the others BLOCK_H query heads each.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, row = tl.arange(0, BLOCK_H), heads + token * row_stride
    if part > 0:
        number = (part - 1) * BLOCK_H + head
        rotate_vectors(
            row + number * HEAD_DIM, number < QUERY_HEADS, token, cos, sin, query_norm, query_eps,
            HEAD_DIM, HALF, QUERY_ONE_PLUS, BLOCK, REST,
        )  # fmt: skip
    else:
        keys, values = QUERY_HEADS * HEAD_DIM, (QUERY_HEADS + CACHE.kv_heads) * HEAD_DIM
        rotate_vectors(
            row + keys + head * HEAD_DIM, head < CACHE.kv_heads, token, cos, sin, key_norm, key_eps,
            HEAD_DIM, HALF, KEY_ONE_PLUS, BLOCK, REST,
        )  # fmt: skip
        tl.debug_barrier()  # other threads of the program read the keys
        write_token(
            token, heads + keys, heads + values, storage, position_pool, accumulators, pages, page_table, lengths,
            token_slots, tokens_after, position, layer, row_stride, HEAD_DIM, row_stride, HEAD_DIM, pool_slots,
            CACHE, KEY, VALUE, HEAD_DIM, NUM_ACCUMULATORS, BLOCK_H, BLOCK_D,
        )  # fmt: skip
