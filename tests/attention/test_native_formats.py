"""The CPU kernels over KVs of few bits against the reference, which decodes them, for every instruction set."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.attention.paged import PagedBatch, paged_batch
from tests.attention.test_native import ISAS, TOLERANCE, attended, backend, close, compare, observes
from torch import Tensor

from winnow.attention import AttentionObserver, AttentionSpec, PagedCache, ReferenceBackend, Smoothing, Term
from winnow.attention.native import reads
from winnow.cache import KVPool
from winnow.cache.codec import PairCodec, PlainCodec, make_codec
from winnow.values.kv_dtype import KV_FORMATS, PLAIN_FORMATS, KVDtype, WideParts

pytestmark = pytest.mark.cpu

FORMATS = KV_FORMATS[1:]  # but `auto`
CODED = [name for name in FORMATS if name not in PLAIN_FORMATS]
CODECS = {
    f"{name}-{rotate}": make_codec(KVDtype.parse(name), None, rotate)
    for name in (*CODED, "k=int8,v=int4", "k=bfloat16,v=int2", "k=int4-outlier,v=float32")
    for rotate in ("auto", "kv")
}
# Threads share the rows of every format alike: codes of bytes and of bits, floats, and of two kinds.
THREADED = ["int8-auto", "int4-outlier-kv", "fp8_e4m3-kv", "k=int8,v=int4-auto", "k=bfloat16,v=int2-kv"]


def test_every_format_is_read() -> None:
    for k in FORMATS:
        for v in FORMATS:
            assert reads(make_codec(KVDtype(k, v)))


@st.composite
def codecs(draw: st.DrawFn, head_dim: int) -> PairCodec:
    """Any pair of formats that stores vectors of `head_dim` channels, in any groups."""
    kinds = [name for name in FORMATS if head_dim % 8 == 0 or "int" not in name or name == "int8"]
    k, v = draw(st.sampled_from(kinds)), draw(st.sampled_from(kinds))
    groups = [n for n in (8, 16, 24, 32, 64) if head_dim % n == 0]
    group = draw(st.sampled_from([None, *groups]))
    codec = make_codec(KVDtype(k, v), group, draw(st.sampled_from(["auto", "none", "k", "kv"])))
    assert isinstance(codec, PairCodec)
    bias = draw(st.booleans())
    return PlainCodec(k, bias) if isinstance(codec, PlainCodec) else replace(codec, bias=bias)


@settings(max_examples=30)
@given(data=st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    draw = data.draw
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 5, 8]))
    counts = draw(st.lists(st.one_of(st.just(1), st.integers(2, 80)), min_size=1, max_size=5))
    head_dim = draw(st.sampled_from([4, 16, 20, 40, 64, 72, 80, 96, 128]))
    batch = paged_batch(
        draw(st.integers(0, 2**31)),
        counts,
        longest=draw(st.sampled_from([0, 30, 400, 3000])),
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=draw(st.sampled_from([1, 4, 5, 16, 32])),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        kv_dtype=draw(codecs(head_dim)),
        num_accumulators=2,
        observe=[draw(st.one_of(st.none(), observes(2))) for _ in counts],
    )
    sinks = torch.linspace(-1, 1, kv_heads * group) if draw(st.booleans()) else None
    window = draw(st.one_of(st.none(), st.integers(1, 500)))
    softcap = draw(st.one_of(st.none(), st.just(1.5)))
    compare(batch, AttentionSpec(0.3, window, softcap, sinks))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_decoding_and_chunks(codec: PairCodec) -> None:
    """As models have them: heads of 64 in blocks of 16, scores watched."""
    observe = [AttentionObserver((Term.ATTENTION, Term.SQUARED)), None, None]
    observe += [AttentionObserver((Term.SQUARED,), replace=True, smoothing=Smoothing(5))]
    batch = paged_batch(
        2,
        [1, 1, 30, 90],
        longest=700,
        group=3,
        head_dim=64,
        block_size=16,
        dtype=torch.bfloat16,
        kv_dtype=codec,
        num_accumulators=2,
        observe=observe,
    )
    compare(batch, AttentionSpec(0.2))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "name", ["int8-auto", "int8-kv", "int4-auto", "k=int8,v=int4-auto", "int4-outlier-auto"]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_integers_lose_less_than_activations(isa: str, name: str, head_dim: int) -> None:
    """Few rows of 16-bit activations may be multiplied as integers: weights stay what float32 makes of them.

    Queries of 8 bits would move them by a percent.
    """
    observe = [AttentionObserver((Term.ATTENTION,))] * 3
    batch = paged_batch(
        5,
        [1, 1, 1],
        longest=300,
        group=3,
        head_dim=head_dim,
        block_size=16,
        dtype=torch.float16,
        kv_dtype=CODECS[name],
        observe=observe,
    )
    scores = []
    for computes in (backend(isa), ReferenceBackend()):
        cache = batch.with_own_pool()
        cache.pool.accumulators.zero_()
        computes.prepare(cache, batch.spans).write(batch.layer, batch.k, batch.v)
        computes.prepare(cache, batch.spans).attend(batch.layer, batch.q, AttentionSpec(0.2))
        scores.append(cache.pool.accumulators)
    torch.testing.assert_close(scores[0], scores[1], rtol=3e-4, atol=1e-6)


@pytest.mark.parametrize("name", THREADED)
def test_threads_and_places_change_nothing(name: str) -> None:
    """Bit for bit, where rows are so long that several threads share one."""
    observe = [AttentionObserver((Term.ATTENTION, Term.SQUARED))] * 4
    batch = paged_batch(
        7, [1, 1, 40, 150], longest=5000, kv_dtype=CODECS[name], num_accumulators=2, observe=observe
    )
    before = torch.get_num_threads()
    found: dict[str, list[tuple[Tensor, KVPool]]] = {isa: [] for isa in ISAS}
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            for isa in ISAS:
                found[isa].append(attended(batch, backend(isa), AttentionSpec(0.3)))
    finally:
        torch.set_num_threads(before)
    for isa, (first, *others) in found.items():
        for out, pool in others:
            assert torch.equal(out, first[0]), isa
            assert torch.equal(pool.accumulators, first[1].accumulators), isa


@pytest.mark.parametrize(
    ("wide", "codec", "dtype"),
    [
        (WideParts(sinks=3, recent=70), CODECS["int4-auto"], torch.bfloat16),
        (WideParts(sinks=900, dtype="float16"), CODECS["int2-kv"], torch.float32),
        (WideParts(recent=1, dtype="float32"), CODECS["k=int8,v=int4-auto"], torch.float16),
    ],
    ids=str,
)
def test_wide_kvs_are_read_where_they_lie(wide: WideParts, codec: PairCodec, dtype: torch.dtype) -> None:
    """Decoding, chunks and scores, and the window itself after the write."""
    observe = [AttentionObserver((Term.ATTENTION, Term.SQUARED)), None, None]
    observe += [AttentionObserver((Term.SQUARED,), replace=True, smoothing=Smoothing(5))]
    batch = paged_batch(
        4,
        [1, 1, 30, 90],
        longest=400,
        group=3,
        head_dim=40,
        dtype=dtype,
        kv_dtype=codec,
        num_accumulators=2,
        observe=observe,
        wide=wide,
    )
    compare(batch, AttentionSpec(0.2))
    k = batch.k.clone()
    k[:, 0, ::7] = math.inf
    windows = []
    for computes in (ReferenceBackend(), *map(backend, ISAS)):
        cache = batch.with_own_pool()
        computes.prepare(cache, batch.spans).write(batch.layer, k, batch.v)
        windows.append(cache.windows[0])
    theirs, *found = windows
    held = theirs.position[:, batch.layer] >= 0
    for isa, ours in zip(ISAS, found, strict=True):
        assert torch.equal(ours.position, theirs.position), isa
        for x, y in ((ours.k, theirs.k), (ours.v, theirs.v)):
            close(isa, *(z[:, batch.layer].transpose(1, 2)[held] for z in (x, y)))


EXTREMES = [0.0, -0.0, 1e-45, 1e-38, 6e-8, 1e-4, 1.0, -3.5, 448.0, 65504.0, -65504.0, 3e4, 1e9, 3e38]


@settings(max_examples=60)
@given(data=st.data())
def test_codes_are_those_of_the_reference(data: st.DataObject) -> None:
    """Bit for bit, also of zeros, constants, denormals and what float16 does not hold."""
    head_dim = data.draw(st.sampled_from([8, 16, 24, 40, 64, 96, 128]))
    codec = data.draw(codecs(head_dim))
    batch = paged_batch(1, [5], longest=0, kv_heads=1, head_dim=head_dim, kv_dtype=codec)
    kinds = st.sampled_from([*EXTREMES, math.inf, -math.inf, math.nan])
    some = st.lists(st.one_of(kinds, st.floats(-9, 9, width=32)), min_size=1, max_size=head_dim)
    k, v = batch.k.clone(), batch.v.clone()
    for x in (k, v):
        for token in range(4):  # the last one stays random
            values = torch.tensor(data.draw(some))
            x[token, 0] = values.repeat(head_dim)[:head_dim]
    theirs, *found = (stored(replace(batch, k=k, v=v), name) for name in (None, *ISAS))
    for isa, ours in zip(ISAS, found, strict=True):
        same_codes(isa, ours, theirs, codec)


def same_codes(isa: str, ours: KVPool, theirs: KVPool, codec: PairCodec) -> None:
    """Assert that pools hold the same, but in vectors with NaN, which only have to decode to the same."""
    for side, form in (("k", codec.key), ("v", codec.value)):
        if form.name in PLAIN_FORMATS:
            continue  # processors that round to bfloat16 themselves make zeros of denormals
        decoded = [
            (pool.of_layer(-1).keys if side == "k" else pool.of_layer(-1).values)(slots(pool))
            for pool in (ours, theirs)
        ]
        close(isa, *decoded)
        finite = decoded[1].isfinite().all(dim=-1)
        for name, field in ours.of_layer(-1).fields.items():
            if name.startswith(side):
                a, b = field.flatten(0, 1)[finite], theirs.of_layer(-1).fields[name].flatten(0, 1)[finite]
                assert torch.equal(a, b), (isa, name)


def slots(pool: KVPool) -> Tensor:
    return torch.arange(pool.num_blocks * pool.layout.block_size)


def stored(batch: PagedBatch, isa: str | None) -> KVPool:
    """What a backend writes; None: the reference."""
    cache: PagedCache = batch.with_own_pool()
    computes = ReferenceBackend() if isa is None else backend(isa)
    computes.prepare(cache, batch.spans).write(batch.layer, batch.k, batch.v)
    return cache.pool
