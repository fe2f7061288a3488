"""Codecs in kernels, which read keys or values of any format and decode them in registers."""

import triton
import triton.language as tl


@triton.jit
def load_biases(storage, flat, inside, KEY: tl.constexpr):
    """Return the biases of KVs in slots `flat`, [N], float32."""
    at = field_at(storage, flat, KEY.bias, 1, tl.float16, 2, KEY)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def field_at(
    storage, flat, OFFSET: tl.constexpr, LENGTH: tl.constexpr, DTYPE: tl.constexpr,
    ITEM_BYTES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Return pointers to the first of LENGTH elements that slots hold of a field, in blocks from byte OFFSET on."""
    first = (storage + OFFSET).to(tl.pointer_type(DTYPE))
    stride: tl.constexpr = SIDE.block_bytes // ITEM_BYTES
    return first + flat // SIDE.block_size * stride + flat % SIDE.block_size * LENGTH


# -- decoding --------------------------------------------------------------------------------------------------------


@triton.jit
def load_halves(storage, flat, index, inside, OFFSET: tl.constexpr, SIDE: tl.constexpr):
    """Return scales or minima, float32, of the groups `index`."""
    groups: tl.constexpr = SIDE.head_dim // SIDE.group
    at = field_at(storage, flat, OFFSET, groups, tl.float16, 2, SIDE)
    return tl.load(at + index, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_group_halves(
    storage, flat, slot_inside, channel, OFFSET: tl.constexpr, SIDE: tl.constexpr, AXIS: tl.constexpr
):
    """Return scales or minima of the groups of all channels, each loaded once, along the dimension AXIS of a tile."""
    group: tl.constexpr = SIDE.group
    count: tl.constexpr = channel.shape[AXIS] // group
    size: tl.constexpr = slot_inside.shape[1 - AXIS]
    number = tl.expand_dims(tl.arange(0, count), 1 - AXIS)
    known = slot_inside & (number < SIDE.head_dim // group)
    x = load_halves(storage, flat, number, known, OFFSET, SIDE)
    if AXIS == 0:
        x = tl.reshape(tl.broadcast_to(x[:, None, :], [count, group, size]), [count * group, size])
    else:
        x = tl.reshape(tl.broadcast_to(x[:, :, None], [size, count, group]), [size, count * group])
    return x


@triton.jit
def load_codes(at, channel, inside, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return the codes of channels below 8 bits, from pointers to the first byte of their vectors."""
    # The compiler sees bytes side by side in `channel % size`, and not in `rest % size`, which is the same.
    group, rest = channel // GROUP * (GROUP * BITS // 8), channel % GROUP
    if BITS == 3:
        low: tl.constexpr = GROUP // 4
        high: tl.constexpr = GROUP // 8
        two = tl.load(at + (group + channel % low), mask=inside, other=0).to(tl.int32) >> (rest // low * 2)
        one = tl.load(at + (group + low + channel % high), mask=inside, other=0).to(tl.int32) >> (
            rest // high
        )
        code = (two & 3) | ((one & 1) << 2)
    else:
        size: tl.constexpr = GROUP * BITS // 8
        byte = tl.load(at + (group + channel % size), mask=inside, other=0).to(tl.int32)
        code = (byte >> (rest // size * BITS)) & (2**BITS - 1)
    return code


@triton.jit
def float_of_e4m3(code):
    """Return the floats, float32, that bytes of e4m3fn stand for, on GPUs without that format too; of NaN any."""
    code = code.to(tl.int16)
    # As exponent and mantissa of a float16, whose exponent counts from 8 lower.
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def bfloat16_of_int8(code):
    """Return int8 codes as bfloat16, four at a time by eight instructions.

    128 + the low seven bits, less 128, or 256 where the sign is set: both are bits of a bfloat16.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, y, high, low, one;
        mov.b32 one, 0x3f803f80;
        prmt.b32 x, $2, 0, 0x4140;
        prmt.b32 y, $2, 0, 0x4342;
        lop3.b32 high, x, 0x007f007f, 0x43004300, 0xea;
        lop3.b32 low, x, 0x00800080, 0xc300c300, 0xea;
        fma.rn.bf16x2 $0, high, one, low;
        lop3.b32 high, y, 0x007f007f, 0x43004300, 0xea;
        lop3.b32 low, y, 0x00800080, 0xc300c300, 0xea;
        fma.rn.bf16x2 $1, high, one, low;
        }
        """,
        "=&r,=r,r",
        [code],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def bfloat16_of_e4m3(code):
    """Return bytes of e4m3fn as bfloat16, four at a time by ten instructions; of NaN any.

    As exponent and mantissa of a bfloat16, whose exponent counts from 120 lower.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, y, size, two_120, zero;
        mov.b32 two_120, 0x7b807b80;
        mov.b32 zero, 0x80008000;
        prmt.b32 x, $2, 0, 0x1404;
        prmt.b32 y, $2, 0, 0x3424;
        shr.u32 size, x, 4;
        and.b32 size, size, 0x07f007f0;
        lop3.b32 x, x, 0x80008000, size, 0xea;
        fma.rn.bf16x2 $0, x, two_120, zero;
        shr.u32 size, y, 4;
        and.b32 size, size, 0x07f007f0;
        lop3.b32 y, y, 0x80008000, size, 0xea;
        fma.rn.bf16x2 $1, y, two_120, zero;
        }
        """,
        "=&r,=r,r",
        [code],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def bfloat16_of_nibbles(byte, shift, scale, least):
    """Return codes of 4 bits times `scale` plus `least`, as bfloat16, four at a time by twelve instructions.

    A code is `byte` >> `shift`, which is the same for channels that one instruction takes: 128 + code, less 128.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, y, one, less, by;
        mov.b32 one, 0x3f803f80;
        mov.b32 less, 0xc300c300;
        and.b32 by, $3, 0x7;
        shr.u32 y, $2, by;
        prmt.b32 x, y, 0, 0x4140;
        prmt.b32 y, y, 0, 0x4342;
        lop3.b32 x, x, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 y, y, 0x000f000f, 0x43004300, 0xea;
        fma.rn.bf16x2 x, x, one, less;
        fma.rn.bf16x2 y, y, one, less;
        fma.rn.bf16x2 $0, x, $4, $6;
        fma.rn.bf16x2 $1, y, $5, $7;
        }
        """,
        "=&r,=r,r,r,r,r,r,r",
        [byte, shift, scale, least],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def load_unscaled(storage, flat, slot_inside, channel, channel_inside, SIDE: tl.constexpr, DOT: tl.constexpr):
    """Return the codes of vectors with one scale, as DOT; see `load_vectors`."""
    at = field_at(storage, flat, SIDE.code, SIDE.code_length, SIDE.dtype, 1, SIDE)
    code = tl.load(at + channel, mask=slot_inside & channel_inside, other=0)
    if tl.bfloat16 == DOT:
        x = bfloat16_of_int8(code) if SIDE.kind == "int8" else bfloat16_of_e4m3(code)
    else:
        x = code.to(DOT) if SIDE.kind == "int8" else float_of_e4m3(code).to(DOT)
    return x


@triton.jit
def load_keys(
    storage, flat, inside, scale, KEY: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Load keys, DOT [D, N]. Returns them with the factors of their products with queries, which include `scale`."""
    d = tl.arange(0, BLOCK_D)[:, None]
    folded: tl.constexpr = KEY.row_scaled and tl.float16 != DOT
    if folded:
        keys = load_unscaled(storage, flat[None, :], inside[None, :], d, d < HEAD_DIM, KEY, DOT)
        factor = scale * load_halves(storage, flat, 0, inside, KEY.scale, KEY)[None, :]
    else:
        keys = load_vectors(storage, flat[None, :], inside[None, :], d, d < HEAD_DIM, KEY, 0, DOT).to(DOT)
        factor = scale
    return keys, factor


@triton.jit
def load_values(
    storage, flat, inside, VALUE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """Load values, DOT [N, D]. Returns them with the factors of their attention weights, float32 [1, N] or [1, 1]."""
    d = tl.arange(0, BLOCK_D)[None, :]
    # float16 could not hold a small weight times a scale.
    folded: tl.constexpr = VALUE.row_scaled and tl.float16 != DOT
    if folded:
        values = load_unscaled(storage, flat[:, None], inside[:, None], d, d < HEAD_DIM, VALUE, DOT)
        factor = load_halves(storage, flat, 0, inside, VALUE.scale, VALUE)[None, :]
    else:
        values = load_vectors(storage, flat[:, None], inside[:, None], d, d < HEAD_DIM, VALUE, 1, DOT).to(DOT)
        factor = tl.full([1, 1], 1.0, tl.float32)  # multiplying by a constant 1 costs nothing
    return values, factor


@triton.jit
def load_vectors(
    storage, flat, slot_inside, channel, channel_inside, SIDE: tl.constexpr, AXIS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Return channels of the vectors in the slots `flat`, which broadcast against each other; 0 where a mask is unset.

    Plain vectors come as they are stored, others decoded to float32, or to DOT where that is cheaper. AXIS: the
    dimension of the result along which all channels lie in order; None: there is one channel.
    """
    kind: tl.constexpr = SIDE.kind
    group: tl.constexpr = SIDE.group
    inside = slot_inside & channel_inside
    at = field_at(storage, flat, SIDE.code, SIDE.code_length, SIDE.dtype, SIDE.item_bytes, SIDE)
    if kind == "plain":
        x = tl.load(at + channel, mask=inside, other=0.0)
    else:
        # One scale a slot where a vector is one group. Groups whose size is no power of two are no part of a tile.
        one_group: tl.constexpr = group == SIDE.head_dim
        by_group: tl.constexpr = AXIS is not None and not one_group and group & (group - 1) == 0
        index = 0 if one_group else channel // group
        known = slot_inside if one_group else inside
        if by_group:
            scale = load_group_halves(storage, flat, slot_inside, channel, SIDE.scale, SIDE, AXIS)
        else:
            scale = load_halves(storage, flat, index, known, SIDE.scale, SIDE)
        if kind == "affine":
            if by_group:
                least = load_group_halves(storage, flat, slot_inside, channel, SIDE.least, SIDE, AXIS)
            else:
                least = load_halves(storage, flat, index, known, SIDE.least, SIDE)
            size: tl.constexpr = group // 2
            if tl.bfloat16 == DOT and SIDE.bits == 4 and size % 16 == 0 and SIDE.outliers == 0:
                byte = tl.load(at + (channel // group * size + channel % size), mask=inside, other=0)
                shift = (channel % group // size * 4).to(tl.uint8)
                x = bfloat16_of_nibbles(byte, shift, scale.to(tl.bfloat16), least.to(tl.bfloat16))
            else:
                x = load_codes(at, channel, inside, SIDE.bits, group).to(tl.float32) * scale + least
        else:
            code = tl.load(at + channel, mask=inside, other=0)
            x = (code.to(tl.float32) if kind == "int8" else float_of_e4m3(code)) * scale
    outliers: tl.constexpr = SIDE.outliers
    for m in tl.static_range(outliers):
        rest_at = field_at(storage, flat, SIDE.outlier, outliers, tl.float16, 2, SIDE)
        which_at = field_at(storage, flat, SIDE.channel, outliers, tl.uint8, 1, SIDE)
        rest = tl.load(rest_at + m, mask=slot_inside, other=0.0).to(tl.float32)
        which = tl.load(which_at + m, mask=slot_inside, other=0).to(tl.int32)
        x += tl.where(which == channel, rest, 0.0)
    return x


# -- encoding --------------------------------------------------------------------------------------------------------
