"""A kernel that compares the keys of a row with their mean direction before rotation, reading them where they lie."""

import triton
import triton.language as tl

from winnow.attention.triton.kernels.codec import load_vectors

LEAST_NORM: tl.constexpr = tl.constexpr(1e-12)


@triton.jit
def load_part(storage, flat, inside, channel, real, KEY: tl.constexpr):
    """Return channels of keys, float32 [N, channels]; zeros where there are none."""
    x = load_vectors(storage, flat[:, None], inside[:, None], channel, real, KEY, None, tl.float32)
    x = x.to(tl.float32)
    return tl.where(inside[:, None] & real, x, 0.0)  # codes may have a minimum there


@triton.jit(do_not_specialize=["first_slot", "stride"])
def compare_keys(
    storage, slots, positions, lengths, counted, sums, cosines, sines, target, first_slot, stride,
    KV_HEADS: tl.constexpr, KEY: tl.constexpr, TURN: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the directions of keys, or compare keys with their sum. A program has TILE KVs. Grid (rows, tiles).

    With `counted`, int32 [rows / KV_HEADS], target is float32 [rows, tiles, d] and receives the sums over the keys at
    positions from there on. Otherwise it is float32 [rows, stride], as `slots` and `positions`, and receives minus the
    cosines with `sums`, float32 [rows, d]. It is unchanged past the lengths of rows. `storage` begins at `first_slot`.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row)
    if tile * TILE >= length:
        return
    i, k = tl.arange(0, TURN.block_pairs)[None, :], tl.arange(0, TURN.block_rest)[None, :]
    if TURN.interleaved:
        first, second = TURN.first + 2 * i, TURN.first + 2 * i + 1
    else:
        first, second = TURN.first + i, TURN.first + TURN.pairs + i
    rest = tl.where(k < TURN.first, k, k + 2 * TURN.pairs)
    paired, beyond = i < TURN.pairs, rest < KEY.head_dim
    if counted is not None:
        since = tl.load(counted + row // KV_HEADS)
        p = tl.zeros([BLOCK_N, TURN.block_pairs], tl.float32)
        q = tl.zeros([BLOCK_N, TURN.block_pairs], tl.float32)
        r = tl.zeros([BLOCK_N, TURN.block_rest], tl.float32)
    else:
        at = sums + row * KEY.head_dim
        p = tl.load(at + first, mask=paired, other=0.0)
        q = tl.load(at + second, mask=paired, other=0.0)
        r = tl.load(at + rest, mask=beyond, other=0.0)
        share = -1.0 / tl.maximum(tl.sqrt(tl.sum(p * p) + tl.sum(q * q) + tl.sum(r * r)), LEAST_NORM)
    for start in range(tile * TILE, tl.minimum(length, tile * TILE + TILE), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < length
        position = tl.load(positions + row * stride + n, mask=inside, other=0)
        if counted is not None:
            inside = inside & (position >= since)
        flat = tl.load(slots + row * stride + n, mask=inside, other=first_slot) - first_slot
        a = load_part(storage, flat, inside, first, paired, KEY)
        b = load_part(storage, flat, inside, second, paired, KEY)
        c = load_part(storage, flat, inside, rest, beyond, KEY)
        square = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
        scale = 1.0 / tl.maximum(tl.sqrt(square), LEAST_NORM)
        angle = position.to(tl.int64)[:, None] * TURN.stride + i
        cos = tl.load(cosines + angle, mask=inside[:, None] & paired, other=0.0)
        sin = tl.load(sines + angle, mask=inside[:, None] & paired, other=0.0)
        if counted is not None:
            p += scale[:, None] * (a * cos + b * sin)
            q += scale[:, None] * (b * cos - a * sin)
            r += scale[:, None] * c
        else:  # a rotation leaves the product of two vectors as it is: turn the sum to the key
            along = tl.sum(cos * (a * p + b * q) + sin * (b * p - a * q), axis=1) + tl.sum(c * r, axis=1)
            tl.store(target + row * stride + n, along * scale * share, mask=inside)
    if counted is not None:
        at = target + (row * tl.num_programs(1) + tile) * KEY.head_dim
        tl.store(at + first, tl.sum(p, axis=0)[None, :], mask=paired)
        tl.store(at + second, tl.sum(q, axis=0)[None, :], mask=paired)
        tl.store(at + rest, tl.sum(r, axis=0)[None, :], mask=beyond)
