"""The Triton backend over KVs of few bits against the reference, which decodes them."""

import math

import pytest
import torch
from scaled_keys import ScaledKeys
from triton_case import DEVICE, SMALL, build, compare

from winnow.attention import AttentionObserver, AttentionSpec, ReferenceBackend, Smoothing, Term, open_backend
from winnow.attention.triton import TritonBackend
from winnow.attention.triton.side_format import reads
from winnow.cache import CacheLayout, KVPool
from winnow.cache.codec import PairCodec, codec_of as codec_by_name, make_codec
from winnow.errors import ConfigError
from winnow.values.kv_dtype import KV_FORMATS, PLAIN_FORMATS, KVDtype

FORMATS = KV_FORMATS[1:]  # but `auto`
CODED = [name for name in FORMATS if name not in PLAIN_FORMATS]
EXTREMES = [0.0, -0.0, 1e-45, 1e-38, 6e-8, 1e-4, 1.0, -3.5, 448.0, 65504.0, -65504.0, 3e4, 1e9, 3e38]
EXTREMES += [math.inf, -math.inf, math.nan]


def codec_of(name: str, rotate: str = "auto", group: int | None = None) -> PairCodec:
    codec = make_codec(KVDtype.parse(name), group, rotate)
    assert isinstance(codec, PairCodec)
    return codec


def test_every_format_is_read() -> None:
    assert all(reads(make_codec(KVDtype(k, v))) for k in FORMATS for v in FORMATS)
    other = CacheLayout.even(1, 1, 16, 16, ScaledKeys())
    with pytest.raises(ConfigError, match="triton does not read KVs stored as scaled"):
        open_backend("triton", DEVICE, other)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize(
    ("name", "rotate", "group", "head_dim"),
    [
        *((name, "none", None, 24) for name in CODED),
        ("int3", "none", 16, 80),
        ("int4-outlier", "none", 72, 144),
        ("k=int2,v=bfloat16", "kv", None, 64),
        ("k=int4,v=fp8_e4m3", "kv", None, 40),
        ("int8", "kv", None, 20),
    ],
)
def test_codes_are_those_of_the_reference(name: str, rotate: str, group: int | None, head_dim: int) -> None:
    """Bit for bit, also of zeros, constants, denormals and what float16 does not hold."""
    codec = codec_of(name, rotate, group)
    case = build(1, [3, 1], longest=9, kv_heads=12, group=1, head_dim=head_dim, kv_dtype=codec)
    generator = torch.Generator().manual_seed(head_dim)
    vectors = [x.cpu().clone() for x in (case.k, case.v)]
    for x in vectors:  # one kind for each head
        some = torch.tensor(EXTREMES)[torch.randint(len(EXTREMES), x[:, :4].shape, generator=generator)]
        x[:, :4] = torch.where(torch.rand(some.shape, generator=generator) < 0.05, some, x[:, :4])
        x[:, 4], x[:, 5], x[:, 6], x[:, 7] = 0.0, 3.25, -0.0, 1e-7
        x[:, 8] *= 448.0
        x[:, 9] = torch.arange(head_dim) % 16 - 7.5  # codes that lie half-way
    k, v = (x.to(DEVICE) for x in vectors)
    ours, theirs = case.with_own_pool(), case.with_own_pool()
    TritonBackend(SMALL).prepare(ours, case.spans).write(case.layer, k, v)
    ReferenceBackend().prepare(theirs, case.spans).write(case.layer, k, v)
    same_codes(ours.pool, theirs.pool, codec)


def same_codes(ours: KVPool, theirs: KVPool, codec: PairCodec) -> None:
    """Assert that pools hold the same, but in vectors with NaN, which only have to decode to the same."""
    assert torch.equal(ours.position, theirs.position)
    slots = torch.arange(theirs.position.numel(), device=theirs.device)
    for side, form in (("k", codec.key), ("v", codec.value)):
        if form.name in PLAIN_FORMATS:
            continue  # the interpreter cuts float32 off where it stores bfloat16
        decoded = [
            pool.of_layer(-1).keys(slots) if side == "k" else pool.of_layer(-1).values(slots)
            for pool in (ours, theirs)
        ]
        torch.testing.assert_close(*decoded, rtol=0, atol=0, equal_nan=True)
        finite = decoded[1].isfinite().all(dim=-1)
        assert finite.any()
        for name, field in ours.of_layer(-1).fields.items():
            if name.startswith(side):
                found, expected = (x.flatten(0, 1)[finite] for x in (field, theirs.of_layer(-1).fields[name]))
                assert torch.equal(found, expected), name


@pytest.mark.parametrize(
    ("name", "rotate", "group", "head_dim", "term"),
    [
        ("int8", "none", None, 8, Term.SQUARED),
        ("int4", "auto", 8, 16, Term.ATTENTION),
        ("int4-outlier", "kv", None, 24, Term.ATTENTION),
        ("fp8_e4m3", "kv", 8, 16, Term.ATTENTION),
        ("int3", "none", None, 8, Term.SQUARED),
        ("k=float32,v=int2", "kv", None, 8, Term.SQUARED),
        ("k=int2,v=float16", "auto", None, 16, Term.ATTENTION),
    ],
)
def test_attention_equals_the_reference(
    name: str, rotate: str, group: int | None, head_dim: int, term: Term
) -> None:
    """A decoding sequence and a chunk, scores watched."""
    sizes = {"longest": 24, "group": 2, "head_dim": head_dim, "kv_dtype": codec_of(name, rotate, group)}
    case = build(7, [1, 4], observe=[AttentionObserver((term,))] * 2, **sizes)
    sinks = torch.linspace(-1, 2, 4, device=DEVICE)
    compare(case, AttentionSpec(0.3, 20, 2.0, sinks), score_atol=1e-4)


@pytest.mark.parametrize(("name", "smoothing"), [("float32", None), ("int8", Smoothing(3))])
def test_biases_are_added(name: str, smoothing: Smoothing | None) -> None:
    """By decoding sequences and chunks, and in the scores of both."""
    codec = codec_by_name(f"{name}+bias")
    observe = [AttentionObserver((Term.ATTENTION,), replace=smoothing is not None, smoothing=smoothing)] * 2
    case = build(8, [1, 4], longest=24, group=2, kv_dtype=codec, observe=observe)
    assert case.cache.pool.of_layer(case.layer).has_bias
    compare(case, AttentionSpec(0.3, 20, 2.0), score_atol=1e-4)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "int8"), (torch.float16, "int4")])
def test_low_precision(dtype: torch.dtype, name: str) -> None:
    sizes = {"longest": 24, "group": 2, "dtype": dtype, "kv_dtype": codec_of(name, "kv")}
    compare(build(7, [1, 3], **sizes), AttentionSpec(0.3))
