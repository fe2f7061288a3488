"""Codecs in kernels, which write keys or values in any format, encoded as `winnow.cache.formats` has it."""

import triton
import triton.language as tl

from winnow.attention.triton.kernels.codec import field_at

# Added to a float32 below 2**22 and taken off again, rounds it to an integer, to nearest even.
ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def rounded(y):
    """Round float32 below 2**22 to integers, to nearest even."""
    return (y + ROUNDING) - ROUNDING


@triton.jit
def divided(x, scale):
    """Return x / scale, and 0 where that is no number: where the scale is 0 or not finite."""
    y = tl.math.div_rn(x, scale)
    return tl.where((tl.abs(y) < float("inf")) & (scale != 0.0), y, 0.0)


@triton.jit
def nan_where(x, broken):
    return tl.where(broken, float("nan"), x)


@triton.jit
def any_nan(x):
    """Return whether a row of x, [H, N], holds one: reductions may skip them."""
    return tl.max((x != x).to(tl.int32), axis=1) > 0


@triton.jit
def e4m3_of_float(y):
    """Return the bytes of e4m3fn, as int32, nearest to floats from -448 to 448, ties to even."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The exponent counts from 120 lower, and 20 bits of the mantissa are rounded off.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 multiples of 2**-9.
    small = rounded(tl.abs(y) * 512.0).to(tl.int32)
    code = tl.where(size < 0x3C800000, small, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def affine_codes(x, least, scale, BITS: tl.constexpr):
    """Return codes, int32, of x by the minima and scales of their groups, float32."""
    y = divided(x - least, scale)
    return rounded(tl.minimum(tl.maximum(y, 0.0), 2.0**BITS - 1.0)).to(tl.int32)


@triton.jit
def store_plane(
    at, x_at, inside, least, scale, CODE_BITS: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Store BITS of the codes of a group, from bit SHIFT on, side by side; `at` and `x_at` [H] point at its first."""
    size: tl.constexpr = GROUP * BITS // 8
    j = tl.arange(0, triton.next_power_of_2(size))
    shown = inside[:, None] & (j < size)[None, :]
    packed = tl.zeros(shown.shape, tl.int32)
    for part in tl.static_range(8 // BITS):
        x = tl.load(x_at[:, None] + (part * size + j)[None, :], mask=shown, other=0.0).to(tl.float32)
        code = affine_codes(x, least[:, None], scale[:, None], CODE_BITS)
        packed |= ((code >> SHIFT) & (2**BITS - 1)) << (part * BITS)
    tl.store(at[:, None] + j[None, :], packed.to(tl.uint8), shown)


@triton.jit
def find_outliers(x_at, inside, COUNT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the channels with the greatest |x|, ties to the first, NaN before all: int32 [H, COUNT or more], or -1."""
    d = tl.arange(0, BLOCK_D)
    shown = inside[:, None] & (d < HEAD_DIM)[None, :]
    x = tl.load(x_at[:, None] + d[None, :], mask=shown, other=0.0).to(tl.float32)
    # Bits of absolute values are in the order of the values.
    left = tl.where(x != x, 0x7FFFFFFF, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    left = tl.where((d < HEAD_DIM)[None, :], left, -1)
    m = tl.arange(0, triton.next_power_of_2(COUNT))
    found = tl.zeros([inside.shape[0], m.shape[0]], tl.int32) - 1
    for number in tl.static_range(COUNT):
        channel = tl.argmax(left, axis=1).to(tl.int32)
        found = tl.where((m == number)[None, :], channel[:, None], found)
        left = tl.where(d[None, :] == channel[:, None], -1, left)
    return found


@triton.jit
def store_outliers(storage, flat, x_at, inside, channel, number, least, scale, SIDE: tl.constexpr):
    """Store what the codes of the channels of a group with this number leave of x; channel: [H, outliers or more]."""
    count: tl.constexpr = SIDE.outliers
    m = tl.arange(0, channel.shape[1])
    shown = inside[:, None] & (m < count)[None, :] & (channel // SIDE.group == number)
    x = tl.load(x_at[:, None] + channel, mask=shown, other=0.0).to(tl.float32)
    code = affine_codes(x, least[:, None], scale[:, None], SIDE.bits).to(tl.float32)
    rest = (x - (code * scale[:, None] + least[:, None])).to(tl.float16)
    # Infinity could make a logit -inf, which attention takes for a mask; NaN is noticed.
    rest = tl.where(tl.abs(rest.to(tl.float32)) == float("inf"), float("nan"), rest.to(tl.float32))
    at = field_at(storage, flat, SIDE.outlier, count, tl.float16, 2, SIDE)
    tl.store(at[:, None] + m[None, :], rest.to(tl.float16), shown)
    at = field_at(storage, flat, SIDE.channel, count, tl.uint8, 1, SIDE)
    tl.store(at[:, None] + m[None, :], channel.to(tl.uint8), shown)


@triton.jit
def store_vectors(
    storage, flat, x_at, inside, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Encode the vectors at the pointers x_at, [H], into the slots `flat`, [H], where `inside`."""
    kind: tl.constexpr = SIDE.kind
    if kind == "plain":
        d = tl.arange(0, BLOCK_D)
        shown = inside[:, None] & (d < HEAD_DIM)[None, :]
        at = field_at(storage, flat, SIDE.code, HEAD_DIM, SIDE.dtype, SIDE.item_bytes, SIDE)
        x = tl.load(x_at[:, None] + d[None, :], mask=shown)
        tl.store(at[:, None] + d[None, :], x.to(SIDE.dtype), shown)
    else:
        group: tl.constexpr = SIDE.group
        groups: tl.constexpr = HEAD_DIM // group
        at = field_at(storage, flat, SIDE.code, SIDE.code_length, SIDE.dtype, 1, SIDE)
        scale_at = field_at(storage, flat, SIDE.scale, groups, tl.float16, 2, SIDE)
        i = tl.arange(0, triton.next_power_of_2(group))
        shown = inside[:, None] & (i < group)[None, :]
        if SIDE.outliers > 0:
            channel = find_outliers(x_at, inside, SIDE.outliers, HEAD_DIM, BLOCK_D)
        for number in range(groups):
            first = x_at + number * group
            x = tl.load(first[:, None] + i[None, :], mask=shown, other=0.0).to(tl.float32)
            if kind == "affine":
                low = tl.where(shown, x, float("inf"))
                high = tl.where(shown, x, float("-inf"))
                if SIDE.outliers > 0:
                    each = (number * group + i)[None, :, None] == channel[:, None, :]
                    kept = tl.max(each.to(tl.int32), axis=2) > 0
                    low = tl.where(kept, float("inf"), low)
                    high = tl.where(kept, float("-inf"), high)
                broken = any_nan(low)
                least = nan_where(tl.min(low, axis=1), broken).to(tl.float16)
                most = nan_where(tl.max(high, axis=1), broken)
                span = tl.math.div_rn(most - least.to(tl.float32), 2.0**SIDE.bits - 1.0)
                scale = tl.where(span < 0.0, 0.0, span).to(tl.float16)
                least_at = field_at(storage, flat, SIDE.least, groups, tl.float16, 2, SIDE)
                tl.store(least_at + number, least, inside)
                least, wide = least.to(tl.float32), scale.to(tl.float32)
                code_at = at + number * (group * SIDE.bits // 8)
                if SIDE.bits == 3:
                    store_plane(code_at, first, inside, least, wide, 3, 0, 2, group)
                    store_plane(code_at + group // 4, first, inside, least, wide, 3, 2, 1, group)
                else:
                    store_plane(code_at, first, inside, least, wide, SIDE.bits, 0, SIDE.bits, group)
                if SIDE.outliers > 0:
                    store_outliers(storage, flat, x_at, inside, channel, number, least, wide, SIDE)
            else:
                limit: tl.constexpr = 127.0 if kind == "int8" else 448.0
                size = nan_where(tl.max(tl.abs(x), axis=1), any_nan(x))
                scale = tl.math.div_rn(size, limit).to(tl.float16)
                y = divided(x, scale.to(tl.float32)[:, None])
                y = tl.minimum(tl.maximum(y, -limit), limit)
                code = rounded(y).to(tl.int32) if kind == "int8" else e4m3_of_float(y)
                tl.store(at[:, None] + (number * group + i)[None, :], code.to(SIDE.dtype), shown)
            tl.store(scale_at + number, scale, inside)
