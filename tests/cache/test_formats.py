"""Formats of stored vectors: where each code lies, how far a decoded vector may be off, and what is never hidden."""

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from winnow.cache import CacheLayout, codec_of, make_codec
from winnow.cache.codec import rotation_block
from winnow.cache.formats import AffineFormat, OutlierFormat, SymmetricFormat, VectorFormat, make_format
from winnow.cache.packing import hadamard, pack, unpack
from winnow.errors import ConfigError
from winnow.values.kv_dtype import KV_FORMATS, NARROW_BITS, ROTATIONS, KVDtype

ROOT = Path(__file__).parents[2]
QUANTIZED = KV_FORMATS[4:]
HALF = 2.0**-11
"""Rounding to float16, as a part of what is rounded; `LEAST_HALF` where that is below its normal numbers."""
LEAST_HALF = 2.0**-25
# Some slack for float32 arithmetic.
SLACK = 1.001


def code_of(packed: list[int], channel: int, bits: int, group: int) -> int:
    """The code of a channel of a group by the text of `winnow.cache.packing`."""

    def field(plane: list[int], width: int) -> int:
        part, byte = divmod(channel, group * width // 8)
        return plane[byte] >> (part * width) & (2**width - 1)

    if bits == 3:
        low, high = packed[: group // 4], packed[group // 4 :]
        return field(low, 2) | field(high, 1) << 2
    return field(packed, bits)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("group", [8, 24, 32, 64])
def test_codes_lie_where_kernels_look_for_them(bits: int, group: int) -> None:
    code = torch.randint(2**bits, (3, 2 * group), dtype=torch.uint8)
    packed = pack(code, bits, group)
    assert packed.shape == (3, 2 * group * bits // 8) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits, group), code)
    for row, codes in zip(packed.unflatten(-1, (2, -1)).tolist(), code.unflatten(-1, (2, -1)), strict=True):
        for part, expected in zip(row, codes, strict=True):
            assert [code_of(part, i, bits, group) for i in range(group)] == expected.tolist()


def test_a_byte_by_hand() -> None:
    assert pack(torch.arange(8, dtype=torch.uint8), 4, 8).tolist() == [0x40, 0x51, 0x62, 0x73]
    assert pack(torch.tensor([1, 0, 2, 0, 3, 0, 1, 0], dtype=torch.uint8), 2, 8).tolist() == [0b01111001, 0]
    # low bits 1 0 0 0 1 0 0 0 -> 0b00010001 per pair of bytes; high bits of channels 0, 3 and 7
    code = torch.tensor([5, 0, 0, 4, 1, 0, 0, 4], dtype=torch.uint8)
    assert pack(code, 3, 8).tolist() == [0b00010001, 0, 0b10001001]


NUMBERS = st.one_of(
    st.floats(-6e4, 6e4, width=32),
    st.floats(-1.0, 1.0, width=32),
    st.floats(-(2.0**-20), 2.0**-20, width=32),
    st.sampled_from([0.0, -0.0, 65504.0, -65504.0, 2.0**-149, -(2.0**-126), 2.0**-24, 1e-30]),
)
VECTORS = st.one_of(
    st.lists(NUMBERS, min_size=32, max_size=32),
    NUMBERS.map(lambda x: [x] * 32),  # constant
    st.tuples(NUMBERS, NUMBERS, st.integers(0, 31)).map(
        lambda t: [t[1] if i == t[2] else t[0] for i in range(32)]
    ),
)


FLOAT16_END = 65520.0
"""From here on numbers round to infinity in float16."""


def half_error(x: Tensor) -> Tensor:
    """The most that rounding to float16 takes."""
    return (x.abs() * HALF).clamp_min(LEAST_HALF)


def bound(form: VectorFormat, x: Tensor, stored: tuple[Tensor, ...]) -> Tensor:
    """The most by which each channel of x, [d], may be off."""
    scale = stored[1].float().repeat_interleave(len(x) // len(stored[1]))
    if isinstance(form, SymmetricFormat):
        most = 448 if form.floating else 127
        rounding = (x.abs() * 2**-4).maximum(scale * 2**-10) if form.floating else scale / 2
        return rounding + most * half_error(scale)
    least = stored[2].float().repeat_interleave(len(x) // len(stored[2]))
    levels = 2 ** NARROW_BITS[form.name] - 1
    return scale / 2 + levels * half_error(scale) + half_error(least)


@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize("name", QUANTIZED)
@given(vector=VECTORS)
def test_a_vector_comes_back_within_half_a_step(name: str, group: int | None, vector: list[float]) -> None:
    form, x = make_format(name, group), torch.tensor(vector)
    stored = form.encode(x)
    decoded = form.decode(*stored)
    assert decoded.dtype == torch.float32 and decoded.shape == x.shape
    off, allowed = (decoded - x).abs(), bound(form, x, stored)
    if isinstance(form, OutlierFormat):
        channel = stored[4].long()
        # What is left of an outlier beside its code is rounded to 16 bits, and that is all.
        allowed[channel] = half_error(stored[3].float()) + x[channel].abs() * 2**-20
        # Where that exceeds float16's range, the channel is NaN, which fails the request, and no other channel is.
        left = x[channel] - AffineFormat.decode(form, *stored[:3])[channel]
        beyond = torch.zeros(len(x), dtype=torch.bool).scatter(0, channel, left.abs() >= FLOAT16_END)
        assert torch.equal(decoded.isnan(), beyond)
        off = off.masked_fill(beyond, 0.0)
        allowed = allowed.masked_fill(beyond, 0.0)
    allowed = allowed * SLACK + x.abs() * 2**-20
    assert (off <= allowed).all(), f"{off.max()} at {int((off - allowed).argmax())}"


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_stay_zeros(name: str) -> None:
    form = make_format(name)
    assert torch.equal(form.decode(*form.encode(torch.zeros(3, 64))), torch.zeros(3, 64))


@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_seen_by_every_query(name: str, wrong: float, rotate: str) -> None:
    """A logit of NaN fails the request; one of -inf would pass for a mask."""
    codec = make_codec(KVDtype(name, name), rotate=rotate)
    k = torch.randn(4, 3, 64)
    k[1, 2, 40] = wrong
    sound = torch.ones(4, 3, dtype=torch.bool)
    sound[1, 2] = False
    for decoded in (codec.keys(codec.encode_keys(k)), codec.values(codec.encode_values(k))):
        assert decoded[sound].isfinite().all()
        assert (decoded[1, 2] * torch.rand(64)).sum().isnan()


@pytest.mark.parametrize("name", QUANTIZED)
def test_beyond_float16_is_no_number(name: str) -> None:
    form, x = make_format(name), torch.zeros(2, 64)
    x[0, 3] = 1e30
    decoded = form.decode(*form.encode(x))
    assert decoded[0].sum().isnan() and not decoded[1].any()


def test_the_largest_channels_are_kept_apart() -> None:
    form, x = make_format("int4-outlier", 32), torch.rand(2, 64)
    x[0, 5], x[1, 63] = 60.0, -30.0  # 16 bits keep them to 0.02
    decoded = form.decode(*form.encode(x))
    assert float((decoded - x).abs().max()) < 0.07
    plain = make_format("int4", 32)
    assert float((plain.decode(*plain.encode(x)) - x).abs().max()) > 0.3
    assert OutlierFormat().count(64) == OutlierFormat().count(128) == 1 and OutlierFormat().count(256) == 3


@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 128])
def test_the_transform_is_orthonormal_and_its_own_inverse(head_dim: int) -> None:
    block = rotation_block(head_dim)
    x, y = torch.randn(2, 5, head_dim)
    turned = hadamard(x, block)
    torch.testing.assert_close(hadamard(turned, block), x)
    torch.testing.assert_close((turned * hadamard(y, block)).sum(-1), (x * y).sum(-1))
    matrix = torch.tensor([[1.0]])
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    by_matrix = x.unflatten(-1, (-1, block)) @ matrix / math.sqrt(block)
    torch.testing.assert_close(turned, by_matrix.flatten(-2))


def test_rotation_spreads_a_large_channel() -> None:
    x = torch.randn(200, 64)
    x[:, 7] += 40.0
    plain, turned = (make_codec(KVDtype("int4", "int4"), rotate=rotate) for rotate in ("none", "k"))
    errors = [float((codec.keys(codec.encode_keys(x)) - x).norm()) for codec in (plain, turned)]
    assert errors[1] < errors[0] / 1.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", ("int8", "int8")),
        ("k=int8,v=int4", ("int8", "int4")),
        ("v=int2, k=auto", ("auto", "int2")),
        ("v=int3", ("auto", "int3")),
    ],
)
def test_formats_are_named_for_both_sides_or_each(text: str, expected: tuple[str, str]) -> None:
    kind = KVDtype.parse(text)
    assert (kind.k, kind.v) == expected
    assert KVDtype.parse(str(kind)) == kind
    assert kind.resolved("float16").k == ("float16" if expected[0] == "auto" else expected[0])


@pytest.mark.parametrize("text", ["int5", "k=int8,k=int4", "k=int8,w=int4", "k=", "", "int8,int4", "k=int8,"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of auto, float32, .*got "):
        KVDtype.parse(text)


def test_who_is_rotated() -> None:
    def sides(name: str, rotate: str) -> tuple[bool, bool]:
        codec = make_codec(KVDtype.parse(name), rotate=rotate)
        return codec.rotate_keys, codec.rotate_values

    assert sides("int4", "auto") == sides("k=int2,v=int8", "auto") == (True, False)
    assert sides("int8", "auto") == sides("k=int8,v=int4", "auto") == sides("int4", "none") == (False, False)
    assert sides("int8", "k") == (True, False) and sides("int8", "kv") == (True, True)
    assert sides("k=float16,v=int4", "kv") == (False, True), "rounding needs no rotation"


@pytest.mark.parametrize(
    ("name", "group", "rotate", "head_dim", "message"),
    [
        ("int4", None, "auto", 20, "int4 KVs need a head_dim that is a multiple of 8"),
        ("int8", 32, "auto", 80, r"kv_group must divide the model's head_dim \(80\) for int8 KVs, got 32"),
        ("int4", 32, "auto", 80, r"kv_group must divide the model's head_dim \(80\) for int4 KVs, got 32"),
        ("int8", None, "k", 15, "kv_rotate needs an even head_dim, the model's is 15"),
        ("int4-outlier", None, "auto", 512, "int4-outlier KVs need a head_dim of at most 256"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    name: str, group: int | None, rotate: str, head_dim: int, message: str
) -> None:
    codec = make_codec(KVDtype.parse(name), group, rotate)
    with pytest.raises(ConfigError, match=message):
        _ = CacheLayout.even(1, 1, head_dim, 16, codec).kinds[0].form


@pytest.mark.parametrize(("head_dim", "group"), [(64, 32), (80, 16), (72, 24), (96, 32), (40, 8)])
def test_groups_of_their_own(head_dim: int, group: int) -> None:
    assert AffineFormat().channels(head_dim) == group
    assert SymmetricFormat().channels(head_dim) == head_dim


def test_the_block_that_the_text_describes() -> None:
    form = CacheLayout.even(1, 1, 64, 16, codec_of("k=int8,v=int4")).kinds[0].form
    assert [(field.name, field.dtype, field.length, offset) for field, offset in form.fields] == [
        ("k", "int8", 64, 0),
        ("k_scale", "float16", 1, 1024),
        ("v", "uint8", 32, 1056),
        ("v_scale", "float16", 2, 1568),
        ("v_min", "float16", 2, 1632),
    ]
    assert form.nbytes == 1696


@pytest.mark.parametrize(
    ("name", "group", "vector_bytes"),
    [
        ("fp8_e4m3", None, 64 + 2),
        ("int8", None, 64 + 2),
        ("int8", 32, 64 + 4),
        ("int4", None, 32 + 8),
        ("int4", 64, 32 + 4),
        ("int4-outlier", None, 32 + 8 + 2 + 1),
        ("int3", None, 24 + 8),
        ("int2", 64, 16 + 4),
    ],
)
def test_bytes_by_hand(name: str, group: int | None, vector_bytes: int) -> None:
    layout = CacheLayout.even(30, 3, 64, 16, make_codec(KVDtype(name, name), group))
    assert layout.block_bytes == 16 * (2 * vector_bytes + 4)


def test_kernels_list_the_formats_that_there_are() -> None:
    """Outliers are fields beside a format's own. Triton takes any of them (tests/attention/test_triton_formats.py)."""
    expected = [name for name in KV_FORMATS[1:] if not name.endswith("-outlier")]
    bindings, stub = (ROOT / path for path in ("native/bindings_types.cpp", "src/winnow/_native.pyi"))
    assert re.findall(r"\.value\(\"(\w+)\", Format::", bindings.read_text()) == expected
    listed = stub.read_text().partition('Enum("Format", "')[2].partition('"')[0]
    assert listed.split() == expected
    assert [make_format(name).name for name in KV_FORMATS[1:]] == [*KV_FORMATS[1:]]
