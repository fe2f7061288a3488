"""Functions that kernels share: the slots of a row's KVs, visibility, logits and the online softmax."""

import triton
import triton.language as tl

from winnow.attention.triton.kernels.codec import load_biases

# Logits are to base 2, since exponentials are.
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def row_length(lengths, slot, layer, head, CACHE: tl.constexpr):
    """Return KVs in the rows of `slot`, `layer` and `head`.

    0 where `slot` is negative, which pads a batch, or `head` is beyond the last, which pads a tile.
    """
    row = (tl.maximum(slot, 0) * CACHE.layers + layer) * CACHE.kv_heads + head
    return tl.where(slot >= 0, tl.load(lengths + row, mask=head < CACHE.kv_heads, other=0), 0)


@triton.jit
def find_blocks(pages, page_table, slot, layer, head, block, inside, CACHE: tl.constexpr):
    """Return the pool's blocks, int64, that are the block-th of a row; 0 where not `inside`."""
    entries: tl.constexpr = CACHE.page_entries
    page = tl.load(page_table + slot * CACHE.pages_per_seq + block // entries, mask=inside, other=0)
    row = (page.to(tl.int64) * CACHE.layers + layer) * CACHE.kv_heads + head
    return tl.load(pages + row * entries + block % entries, mask=inside, other=0).to(tl.int64)


@triton.jit
def find_slots(
    pages, page_table, slot, layer, head, first, length, CACHE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return flat slot numbers, int64 [BLOCK_N], of the KVs of a row from `first` on, a multiple of BLOCK_N.

    Those from `length` on are any slots of the pool.
    """
    n = first + tl.arange(0, BLOCK_N)
    # Look each block of a small tile up once. In a tile of 128 each thread has a KV to look up, and passes it on, where
    # the compiler would repeat what is looked up by block in every layout: twice the instructions.
    size: tl.constexpr = CACHE.block_size
    if BLOCK_N < 128 and BLOCK_N % size == 0 and size & (size - 1) == 0:
        blocks: tl.constexpr = BLOCK_N // size
        number = first // size + tl.arange(0, blocks)
        block = find_blocks(pages, page_table, slot, layer, head, number, number * size < length, CACHE)
        block = tl.reshape(tl.broadcast_to(block[:, None], [blocks, size]), [BLOCK_N])
    else:
        block = find_blocks(pages, page_table, slot, layer, head, n // size, n < length, CACHE)
    return block * size + n % size


@triton.jit
def reach(now, WINDOW: tl.constexpr):
    """Return how many positions queries at `now` see, their own included; WINDOW is not None."""
    if WINDOW.chunked:
        return now % WINDOW.size + 1
    else:
        return tl.full((), WINDOW.size, tl.int32)  # a jitted function returns no plain numbers


@triton.jit
def sees(now, age, inside, WINDOW: tl.constexpr):
    """Return whether a query at `now` sees a KV `age` positions back."""
    visible = inside & (age >= 0)
    if WINDOW is not None:
        visible = visible & (age < reach(now, WINDOW))
    return visible


@triton.jit
def logits_of(
    queries, keys, factor, storage, flat, inside, slopes, age, KEY: tl.constexpr, SOFTCAP: tl.constexpr
):
    """Return logits to base 2, float32 [M, N], and a number by which they are still to be multiplied.

    They are products of queries [M, D] and keys [D, N] times `factor`, soft-capped and biased. `factor` is to base 2
    unless there is a soft-cap. A factor of all KVs is left to the exponential, where it costs no instruction.
    slopes: of the queries, [M, 1] or one, or None; age: positions from KVs to queries, which nothing reads then.
    """
    # "ieee": multiply float32 in full precision, not in TF32.
    logits = tl.dot(queries, keys, input_precision="ieee")
    one_factor: tl.constexpr = not KEY.row_scaled or queries.dtype == tl.float16
    if SOFTCAP is None and KEY.bias == 0 and slopes is None and one_factor:
        unit = factor
    else:
        unit = tl.full([], 1.0, tl.float32)  # multiplying by a constant 1 costs nothing
        logits *= factor
        if SOFTCAP is not None:
            # tanh from exp(-2 |x|), which cannot overflow
            e = tl.exp2(tl.abs(logits) * (-2.0 * LOG2E / SOFTCAP))
            bent = (SOFTCAP * LOG2E) * (1.0 - e) / (1.0 + e)
            logits = tl.where(logits < 0, -bent, bent)
        if KEY.bias > 0:
            logits += LOG2E * load_biases(storage, flat, inside, KEY)[None, :]
        if slopes is not None:
            logits -= LOG2E * slopes * age
    return logits, unit


@triton.jit
def online_softmax(logits, unit, values, factor, row_max, row_sum, acc):
    """Update the online softmax of each query by a block of KVs.

    logits, unit: see `logits_of`, -inf where a query does not see a KV; values: [N, D], to be multiplied by `factor`,
    [1, N] or [1, 1]. row_max [M]: largest logit so far, to base 2, row_sum [M]: sum of 2 ** (logit - row_max),
    acc [M, D]: sum of 2 ** (logit - row_max) v. Returns the updated three.
    """
    new_max = tl.maximum(row_max, tl.max(logits, axis=1) * unit)
    # Without a visible KV the maximum is -inf, and -inf - -inf would be NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - base)
    weight = tl.exp2(logits * unit - base[:, None])
    row_sum = row_sum * rescale + tl.sum(weight, axis=1)
    acc = tl.dot((weight * factor).to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    return new_max, row_sum, acc
