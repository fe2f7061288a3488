"""The CPU kernels against the reference, for every instruction set that this processor runs."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scaled_keys import ScaledKeys
from tests.attention.paged import PagedBatch, contents_of, paged_batch, with_codec
from torch import Tensor

_native = pytest.importorskip("winnow._native")
from winnow.attention import (  # noqa: E402
    AttentionObserver,
    AttentionSpec,
    Group,
    PagedCache,
    ReferenceBackend,
    Smoothing,
    Term,
)
from winnow.attention.interface import AttentionBackend  # noqa: E402
from winnow.attention.native import NativeBackend  # noqa: E402
from winnow.cache import KVPool  # noqa: E402
from winnow.cache.codec import PlainCodec  # noqa: E402
from winnow.cache.layout import PAGE_ENTRIES  # noqa: E402
from winnow.errors import ConfigError  # noqa: E402
from winnow.process import native  # noqa: E402

pytestmark = pytest.mark.cpu

ISAS = _native.instruction_sets()
TILE_ISAS = [isa for isa in ISAS if isa.startswith("amx")]
needs_tiles = pytest.mark.skipif(
    not TILE_ISAS, reason="needs tile registers: WINNOW_EMULATE_TILES=1 pip install -e ."
)
# Largest difference from the reference, relative to what is compared, and absolute below 1.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Where chunks over coded KVs are multiplied as bfloat16, which rounds what is decoded.
ROUNDED_TOLERANCE = 4e-2
BF16_ISAS = [isa for isa in ISAS if isa == "avx512_bf16" or isa.startswith("amx")]


def backend(isa: str) -> NativeBackend:
    return NativeBackend(_native.Kernels(isa))


def tolerance_of(batch: PagedBatch, isa: str) -> float:
    is_coded = not isinstance(batch.cache.pool.layout.codecs[0], PlainCodec)
    rounds = is_coded and isa in BF16_ISAS and batch.q.dtype == torch.bfloat16
    return ROUNDED_TOLERANCE if rounds else TOLERANCE[batch.q.dtype]


def close(isa: str, found: Tensor, expected: Tensor, rtol: float = 0, atol: float = 0) -> None:
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{isa}: {text}"
    )


def compare(batch: PagedBatch, spec: AttentionSpec, isas: Sequence[str] = ISAS) -> None:
    """Write and attend with all backends over memory of their own; outputs and all of the memory must agree."""
    (expected, theirs), *found = (
        attended(batch, each, spec) for each in (ReferenceBackend(), *map(backend, isas))
    )
    for isa, (out, ours) in zip(isas, found, strict=True):
        tolerance = tolerance_of(batch, isa)
        close(isa, out, expected, tolerance, tolerance)
        assert torch.equal(ours.position, theirs.position), isa
        for name, field in ours.of_layer(-1).fields.items():
            close(isa, field, theirs.of_layer(-1).fields[name])
        close(isa, ours.accumulators, theirs.accumulators, tolerance, max(tolerance, 1e-5))


def attended(batch: PagedBatch, computes: AttentionBackend, spec: AttentionSpec) -> tuple[Tensor, KVPool]:
    """The output, and the memory afterwards."""
    cache = batch.with_own_pool()
    computes.prepare(cache, batch.spans).write(batch.layer, batch.k, batch.v)
    return computes.prepare(cache, batch.spans).attend(batch.layer, batch.q, spec), cache.pool


def observes(num_accumulators: int) -> st.SearchStrategy[AttentionObserver]:
    """All of `AttentionObserver` but thresholds, which rounding tips over: see test_below_average."""
    smooth_terms = [term for term in Term if term is not Term.BELOW_AVERAGE]
    pools = st.builds(
        Smoothing,
        size=st.sampled_from([1, 3, 7]),
        kind=st.sampled_from(["max", "average"]),
        per_query_head=st.booleans(),
        skip_window=st.booleans(),
    )
    fields = {
        "terms": st.lists(st.sampled_from(smooth_terms), min_size=1, max_size=num_accumulators).map(tuple),
        "group": st.sampled_from(Group),
        "exclude_first": st.sampled_from([0, 1, 5]),
    }
    added = st.builds(AttentionObserver, **fields)
    replaced = st.builds(
        AttentionObserver, **fields, replace=st.just(True), smoothing=st.one_of(st.none(), pools)
    )
    return st.one_of(added, replaced)


@settings(max_examples=30)
@given(data=st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    draw = data.draw
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 5, 8]))
    counts = draw(st.lists(st.one_of(st.just(1), st.integers(2, 80)), min_size=1, max_size=5))
    batch = paged_batch(
        draw(st.integers(0, 2**31)),
        counts,
        longest=draw(st.sampled_from([0, 30, 400, 3000])),
        kv_heads=kv_heads,
        group=group,
        head_dim=draw(st.sampled_from([4, 16, 20, 40, 64, 72, 80, 128])),
        block_size=draw(st.sampled_from([1, 4, 5, 16, 32])),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        kv_dtype=draw(st.one_of(st.none(), st.sampled_from(list(TOLERANCE)))),
        num_accumulators=2,
        observe=[draw(st.one_of(st.none(), observes(2))) for _ in counts],
    )
    sinks = torch.linspace(-1, 1, kv_heads * group) if draw(st.booleans()) else None
    window = draw(st.one_of(st.none(), st.integers(1, 500)))
    softcap = draw(st.one_of(st.none(), st.just(1.5)))
    slopes = 0.3 ** torch.arange(kv_heads * group) if draw(st.booleans()) else None
    chunked = window is not None and draw(st.booleans())
    compare(batch, AttentionSpec(0.3, window, softcap, sinks, slopes, chunked))


@pytest.mark.parametrize("kv_dtype", TOLERANCE, ids=lambda dtype: f"KVs {dtype}")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_activations_and_kvs_have_dtypes_of_their_own(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Neither is rounded to the other: float32 queries over bfloat16 KVs are as exact as over float32 ones."""
    observe = [
        AttentionObserver((Term.ATTENTION,)),
        None,
        AttentionObserver((Term.SQUARED,), replace=True, smoothing=Smoothing(5)),
        None,
    ]
    batch = paged_batch(
        5, [1, 1, 30, 90], longest=500, head_dim=72, dtype=dtype, kv_dtype=kv_dtype, observe=observe
    )
    compare(batch, AttentionSpec(0.3))


def test_an_unknown_dtype_is_refused() -> None:
    batch = paged_batch(3, [1, 5])
    with pytest.raises(TypeError, match=r"compute with torch.float32, .*, got torch.float64"):
        backend(ISAS[0]).prepare(batch.cache, batch.spans).attend(
            batch.layer, batch.q.double(), AttentionSpec(1.0)
        )


@needs_tiles
@pytest.mark.parametrize("head_dim", [16, 40, 80, 128])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("longest", [0, 300])
@pytest.mark.parametrize("most", [16, 31, 97])
def test_rests_of_tile_registers(head_dim: int, group: int, longest: int, most: int) -> None:
    """One row and one key fewer and more than registers hold, and items hold; `most` is what a batch needs them for."""
    counts = [1, 5, 6, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97]
    counts = [count for count in counts if count <= most]
    observe = AttentionObserver((Term.ATTENTION, Term.SQUARED))
    batch = paged_batch(
        head_dim,
        counts,
        longest=longest,
        kv_heads=1,
        group=group,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        num_accumulators=2,
        observe=[observe] * len(counts),
    )
    compare(batch, AttentionSpec(0.3), TILE_ISAS)


@needs_tiles
@pytest.mark.parametrize("isa", TILE_ISAS or ["amx"])
def test_tile_registers_multiply_chunks_alone(isa: str) -> None:
    """Decoding is the same as without them, bit for bit; chunks are not, since they sum in another order."""

    def run(isa: str, counts: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        observe = [AttentionObserver((Term.ATTENTION,))] * len(counts)
        batch = paged_batch(5, counts, longest=700, head_dim=64, dtype=dtype, observe=observe)
        computes = backend(isa)
        computes.prepare(batch.cache, batch.spans).write(batch.layer, batch.k, batch.v)
        out = computes.prepare(batch.cache, batch.spans).attend(batch.layer, batch.q, AttentionSpec(0.3))
        return out, batch.cache.pool.accumulators

    def same_bits(counts: list[int], dtype: torch.dtype) -> tuple[bool, bool]:
        with_tiles, without = run(isa, counts, dtype), run("avx512_bf16", counts, dtype)
        return torch.equal(with_tiles[0], without[0]), torch.equal(with_tiles[1], without[1])

    assert same_bits([1, 1, 7], torch.bfloat16) == (True, True)  # 14 rows
    assert same_bits([40], torch.bfloat16) == (False, False)
    assert same_bits([40], torch.float16) == same_bits([40], torch.float32) == (True, True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_where_blocks_lie_changes_nothing(isa: str, dtype: torch.dtype) -> None:
    """Bit for bit: who else has blocks of the pool must not change a sequence's answer."""
    observe = [
        AttentionObserver((Term.ATTENTION,)),
        None,
        AttentionObserver((Term.SQUARED,), exclude_first=5),
    ]
    batch = paged_batch(11, [1, 1, 2], longest=900, group=3, block_size=16, dtype=dtype, observe=observe)
    pool, tables = batch.cache.pool, batch.cache.tables
    computes = backend(isa)

    def run() -> Tensor:
        computes.prepare(batch.cache, batch.spans).write(batch.layer, batch.k, batch.v)
        return computes.prepare(batch.cache, batch.spans).attend(batch.layer, batch.q, AttentionSpec(0.3))

    scores = pool.accumulators.clone()
    scattered, scattered_scores = run(), pool.accumulators.clone()
    # Now each row's blocks side by side, one after the other.
    slots = torch.tensor(batch.spans.slots)
    rows = tables.lookup_layers(slots, tables.page_table.shape[1] * PAGE_ENTRIES).flatten().long()
    _, order = np.unique(rows.numpy(), return_index=True)
    held = rows[torch.from_numpy(np.sort(order))]
    rest = torch.from_numpy(np.setdiff1d(np.arange(pool.num_blocks), held.numpy()))
    old = torch.cat([held, rest])
    pool.accumulators.copy_(scores)
    for blocks in (pool.of_layer(-1).storage, pool.position, pool.accumulators[0]):
        blocks.copy_(blocks[old])
    tables.pages.copy_(torch.argsort(old)[tables.pages.long()])
    assert torch.equal(run(), scattered)
    assert torch.equal(pool.accumulators[0], scattered_scores[0][old])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_many_query_heads_finish_long_rows(dtype: torch.dtype) -> None:
    # So many that a decoding row of thousands of keys is one item.
    observe = [AttentionObserver((Term.ATTENTION,)), AttentionObserver((Term.SQUARED,), exclude_first=5)]
    batch = paged_batch(
        3, [1, 1], longest=7000, kv_heads=1, group=40, block_size=16, dtype=dtype, observe=observe
    )
    compare(batch, AttentionSpec(0.3))


@pytest.mark.parametrize("window", [None, 40])
def test_chunks_that_take_turns(window: int | None) -> None:
    # So many of them that a thread takes several at a time and asks for the next one's KVs while it computes one.
    counts = [1, 1] + [21] * 60
    observe = [AttentionObserver((Term.ATTENTION,))] * len(counts)
    batch = paged_batch(7, counts, longest=90, group=2, dtype=torch.bfloat16, observe=observe)
    compare(batch, AttentionSpec(0.25, window=window))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("exclude_first", [0, 5])
def test_below_average(window: int | None, exclude_first: int) -> None:
    observe = AttentionObserver((Term.BELOW_AVERAGE,), Group.SUM, exclude_first)
    batch = paged_batch(1, [1, 1, 30], longest=300, observe=[observe] * 3)
    compare(batch, AttentionSpec(0.3, window))


def test_kvs_that_kernels_cannot_read_are_refused() -> None:
    batch = paged_batch(1, [1, 3])
    layout = with_codec(batch.cache.pool.layout, ScaledKeys())
    cache = PagedCache(KVPool(layout, batch.cache.pool.num_blocks), batch.cache.tables)
    with pytest.raises(ConfigError, match=r"native reads KVs stored as one of float32, .*, got scaled"):
        backend(ISAS[0]).prepare(cache, batch.spans).write(batch.layer, batch.k, batch.v)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_threads_change_nothing(isa: str, dtype: torch.dtype) -> None:
    """Bit for bit, where rows are so long that several threads share one."""
    observe = AttentionObserver((Term.ATTENTION, Term.SQUARED))
    pooled = AttentionObserver((Term.ATTENTION,), replace=True, smoothing=Smoothing(7))
    batch = paged_batch(
        7, [1, 1, 1, 40, 150], longest=9000, dtype=dtype, num_accumulators=2, observe=[observe] * 4 + [pooled]
    )
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            cache, computes = batch.with_own_pool(), backend(isa)
            computes.prepare(cache, batch.spans).write(batch.layer, batch.k, batch.v)
            out = computes.prepare(cache, batch.spans).attend(batch.layer, batch.q, AttentionSpec(0.3))
            found.append((out, cache.pool.accumulators))
    finally:
        torch.set_num_threads(before)
    for out, score in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(score, found[0][1])


@pytest.mark.parametrize("isa", ISAS)
def test_takes_tensors_as_models_lay_them_out(isa: str) -> None:
    """Heads before tokens, or queries, keys and values side by side in one buffer."""
    batch = paged_batch(3, [1, 1, 9])
    dense = backend(isa).prepare(batch.with_own_pool(), batch.spans)
    spec = AttentionSpec(0.3)
    dense.write(batch.layer, batch.k, batch.v)
    expected = dense.attend(batch.layer, batch.q, spec)
    together = torch.cat([batch.q, batch.k, batch.v], dim=1)
    q, k, v = together.split([4, 2, 2], dim=1)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    last_strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for laid_out in ((q, k, v), heads_first, last_strided):
        step = backend(isa).prepare(batch.with_own_pool(), batch.spans)
        step.write(batch.layer, *laid_out[1:])
        assert torch.equal(step.attend(batch.layer, laid_out[0], spec), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_compact_equals_the_reference(isa: str, dtype: torch.dtype) -> None:
    batch = paged_batch(4, [1] * 8, longest=600, dtype=dtype, num_accumulators=2)
    order = torch.randperm(1000)
    source, target = order[:400], order[400:800]
    ours, theirs = batch.with_own_pool().pool, batch.with_own_pool().pool
    backend(isa).compact(ours, source, target)
    ReferenceBackend().compact(theirs, source, target)
    for found, expected in zip(*(contents_of(pool) for pool in (ours, theirs)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
def test_moving_copies_every_field_of_a_slot(isa: str) -> None:
    """Whatever a codec stores: fields of any number of bytes, apart or in one block."""
    blocks, block_size = 20, 4
    generator = torch.Generator().manual_seed(0)
    fields = [
        torch.randint(256, (blocks, block_size, width), dtype=torch.uint8, generator=generator)
        for width in (13, 1, 64, 2)
    ]
    position = torch.arange(blocks * block_size, dtype=torch.int32)
    accumulators = torch.randn(2, blocks * block_size, generator=generator)
    order = torch.randperm(blocks * block_size, generator=generator)
    source, target = order[:30], order[30:60]
    expected = [field.clone().flatten(0, 1) for field in fields]
    for field in (*expected, expected_position := position.clone()):
        field[target] = field[source]
    expected_accumulators = accumulators.clone()
    expected_accumulators[:, target] = accumulators[:, source]
    pool = native.Pool(
        fields=[native.Field(field.data_ptr(), field.stride(1), field.stride(0)) for field in fields],
        k=0,
        v=0,
        position=position.data_ptr(),
        accumulators=accumulators.data_ptr(),
        num_slots=blocks * block_size,
        num_accumulators=2,
        block_size=block_size,
        block_stride=0,
        head_dim=0,
        dtype=native.DType.f32,
    )
    native.Kernels(isa).compact(pool, source.data_ptr(), target.data_ptr(), len(source), 2)
    assert all(torch.equal(field.flatten(0, 1), x) for field, x in zip(fields, expected, strict=True))
    assert torch.equal(position, expected_position)
    assert torch.equal(accumulators, expected_accumulators)


def test_a_wrong_shape_is_refused() -> None:
    batch = paged_batch(3, [1, 5])
    computes = backend(ISAS[0])
    with pytest.raises(AssertionError, match=r"q must be \[6, n x 2, 16\]"):
        computes.prepare(batch.cache, batch.spans).attend(batch.layer, batch.q[:5], AttentionSpec(1.0))


def test_the_instruction_set_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = native.native_kernels.__wrapped__
    monkeypatch.setenv("WINNOW_ISA", "generic")
    assert isinstance(choose(), native.Kernels)
    assert _native.instruction_sets()[-1] != "amx_emulated"  # what is taken when none is named
    monkeypatch.setenv("WINNOW_ISA", "avx1024")
    with pytest.raises(
        ConfigError, match=r"WINNOW_ISA: instruction set must be one of generic.* got avx1024"
    ):
        choose()
