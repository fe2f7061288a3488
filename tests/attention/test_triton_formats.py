"""The Triton backend over KVs of few bits against the reference, which decodes them."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_case import DEVICE, SMALL, build, compare

from winnow.attention import AttentionObserver, AttentionSpec, Group, ReferenceBackend, Smoothing, Term, open_backend
from winnow.attention.triton import TritonBackend
from winnow.attention.triton.side_format import reads
from winnow.cache import CacheLayout, KVCodec, KVPool
from winnow.cache.codec import PairCodec, make_codec
from winnow.errors import ConfigError
from winnow.kv_dtype import KV_FORMATS, PLAIN_FORMATS, KVDtype

FORMATS = KV_FORMATS[1:]  # but `auto`
CODED = [name for name in FORMATS if name not in PLAIN_FORMATS]
EXTREMES = [0.0, -0.0, 1e-45, 1e-38, 6e-8, 1e-4, 1.0, -3.5, 448.0, 65504.0, -65504.0, 3e4, 1e9, 3e38]
EXTREMES += [math.inf, -math.inf, math.nan]
OBSERVERS = [
    AttentionObserver((Term.ATTENTION, Term.VALUE_AWARE)),
    None,
    AttentionObserver((Term.VALUE_AWARE,), Group.MEAN, 2),
    AttentionObserver((Term.SQUARED,), replace=True, smoothing=Smoothing(5)),
]


def codec_of(name: str, rotate: str = "auto", group: int | None = None) -> PairCodec:
    codec = make_codec(KVDtype.parse(name), group, rotate)
    assert isinstance(codec, PairCodec)
    return codec


def test_every_movable_format_is_read() -> None:
    assert all(reads(make_codec(KVDtype(k, v))) for k in FORMATS for v in FORMATS)
    kivi = CacheLayout(1, 1, 16, 16, make_codec(KVDtype.parse("kivi4")))
    with pytest.raises(ConfigError, match="triton does not read KVs stored as kivi4"):
        open_backend("triton", DEVICE, kivi)


@pytest.mark.parametrize(
    ("codec", "head_dim"),
    [
        *((codec_of(name, rotate), 24) for name in CODED for rotate in ("none", "kv")),
        *((codec_of(name, "none"), 72) for name in ("int3", "int4-outlier")),
        *((codec_of(name, "none", 16), 80) for name in CODED),
        (codec_of("int4-outlier", "none"), 256),
        (codec_of("k=int8,v=int4"), 64),
        (codec_of("k=int2,v=bfloat16"), 64),
        (codec_of("int8"), 20),
        (codec_of("fp8_e4m3", "kv"), 20),
    ],
    ids=str,
)
def test_codes_are_those_of_the_reference(codec: PairCodec, head_dim: int) -> None:
    """Bit for bit, also of zeros, constants, denormals and what float16 does not hold."""
    generator = torch.Generator().manual_seed(head_dim)
    case = build(1, [12, 1], longest=9, kv_heads=3, group=1, head_dim=head_dim, kv_dtype=codec)
    k, v = case.k.clone(), case.v.clone()
    for x in (k, v):
        some = torch.tensor(EXTREMES)[torch.randint(len(EXTREMES), x[:6].shape, generator=generator)]
        rare = torch.rand(some.shape, generator=generator) < 0.05
        x[:6] = torch.where(rare, some, x[:6].cpu()).to(x.device)
        x[6, 0], x[6, 1], x[7, 0], x[7, 1] = 0.0, 3.25, -0.0, 1e-7
        x[8] = 448.0 * torch.randn(x[8].shape, generator=generator).to(x.device)
        x[9] = torch.arange(x[9].numel(), device=x.device).reshape(x[9].shape) % 16 - 7.5  # half-way codes
    case = replace(case, k=k, v=v)
    ours, theirs = case.with_own_pool(), case.with_own_pool()
    TritonBackend(DEVICE, SMALL).write(ours, case.spans, case.layer, k, v)
    ReferenceBackend().write(theirs, case.spans, case.layer, k, v)
    same_codes(ours.pool, theirs.pool, codec)


def same_codes(ours: KVPool, theirs: KVPool, codec: PairCodec) -> None:
    assert torch.equal(ours.position, theirs.position)
    slots = torch.arange(theirs.position.numel(), device=theirs.device)
    for side, form in (("k", codec.key), ("v", codec.value)):
        if form.name in PLAIN_FORMATS:
            continue
        decoded = [pool.keys(slots) if side == "k" else pool.values(slots) for pool in (ours, theirs)]
        torch.testing.assert_close(*decoded, rtol=0, atol=0, equal_nan=True)
        finite = decoded[1].isfinite().all(dim=-1)
        assert finite.any()
        for name, field in ours.fields.items():
            if name.startswith(side):
                assert torch.equal(field.flatten(0, 1)[finite], theirs.fields[name].flatten(0, 1)[finite]), name


@pytest.mark.parametrize(
    ("codec", "head_dim"),
    [
        *((codec_of(name), 16) for name in CODED),
        *((codec_of(name, "kv", 8), 24) for name in CODED),
        (codec_of("int4-outlier", "kv"), 40),
        (codec_of("k=int8,v=int4"), 32),
        (codec_of("k=float32,v=int2", "kv"), 16),
        (codec_of("k=int3,v=bfloat16"), 16),
    ],
    ids=str,
)
def test_attention_equals_the_reference(codec: PairCodec, head_dim: int) -> None:
    """Decoding sequences and chunks, scores watched."""
    case = build(
        7, [1, 1, 5, 9], longest=30, head_dim=head_dim, kv_dtype=codec, num_accumulators=2, observe=OBSERVERS
    )
    sinks = torch.linspace(-1, 2, 6, device=DEVICE)
    compare(case, AttentionSpec(0.3, 20, 2.0, sinks), score_atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "int4"])
def test_low_precision(dtype: torch.dtype, name: str) -> None:
    compare(build(7, [1, 1, 5], longest=30, head_dim=16, dtype=dtype, kv_dtype=codec_of(name, "kv")), AttentionSpec(0.3))
