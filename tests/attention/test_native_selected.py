"""The CPU kernels that read few values, for every instruction set, against the reference."""

from dataclasses import replace

import pytest
import torch
from tests.attention.paged import PagedBatch, paged_batch
from tests.attention.test_native import ISAS, backend, close, tolerance_of
from torch import Tensor

from winnow.attention import AttentionObserver, AttentionSpec, ReferenceBackend, Smoothing, Term
from winnow.attention.interface import AttentionBackend
from winnow.cache.codec import make_codec
from winnow.values.kv_dtype import KVDtype
from winnow.values.tier_traffic import TierTraffic

pytestmark = pytest.mark.cpu

PLAIN = AttentionSpec(0.3)
BENT = AttentionSpec(0.3, 300, 5.0, torch.linspace(-1, 2, 15))
FALLING = AttentionSpec(0.3, 300, slopes=0.1 * torch.arange(15), chunked=True)
# Format of KVs, type of queries, query heads a group, channels, slots a block, N, and how the layer attends.
CASES = {
    "float32": ("float32", torch.float32, 1, 16, 4, 3, PLAIN),
    "bfloat16": ("bfloat16", torch.bfloat16, 3, 64, 16, 32, PLAIN),
    "float16": ("float16", torch.float16, 5, 80, 16, 17, BENT),
    "int8": ("int8", torch.bfloat16, 4, 64, 16, 128, PLAIN),
    "mixed": ("k=int8,v=int4", torch.float32, 3, 128, 32, 64, BENT),
    "int4": ("int4", torch.float32, 8, 64, 16, 33, PLAIN),
    "slopes": ("bfloat16", torch.float32, 2, 64, 16, 33, FALLING),
    "outliers": ("int4-outlier", torch.float32, 2, 40, 5, 9, PLAIN),
    "fp8": ("fp8_e4m3", torch.float32, 5, 20, 1, 1, BENT),
}


def attend(
    batch: PagedBatch, computes: AttentionBackend, spec: AttentionSpec
) -> tuple[Tensor, Tensor, TierTraffic]:
    cache = batch.with_own_pool()
    computes.prepare(cache, batch.spans).write(batch.layer, batch.k, batch.v)
    out = computes.prepare(cache, batch.spans).attend(batch.layer, batch.q, spec)
    traffic = cache.pool.of_layer(-1).traffic
    traffic.seconds_waited = 0.0
    return out, cache.pool.accumulators, traffic


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_reference(
    case: tuple[str, torch.dtype, int, int, int, int, AttentionSpec], renormalize: bool
) -> None:
    """Decodes and chunks whose first half reads all values; scores watched; rows of any length."""
    kind, dtype, group, head_dim, size, top_n, spec = case
    of_heads = {name: getattr(spec, name) for name in ("sinks", "slopes")}
    spec = replace(spec, **{name: x[: 3 * group] for name, x in of_heads.items() if x is not None})
    observe = [AttentionObserver((Term.ATTENTION,)), None, None, None]
    observe += [AttentionObserver((Term.SQUARED,), replace=True, smoothing=Smoothing(5))]
    batch = paged_batch(
        11,
        [1, 1, 1, 7, 40],
        longest=600,
        kv_heads=3,
        group=group,
        head_dim=head_dim,
        block_size=size,
        dtype=dtype,
        kv_dtype=make_codec(KVDtype.parse(kind), None, "kv" if kind == "int4" else "auto"),
        observe=observe,
        value_tier=f"host:N={top_n}{',as-softmaxed' * (not renormalize)}",
    )
    theirs = attend(batch, ReferenceBackend(), spec)
    for isa in ISAS:
        ours, tolerance = attend(batch, backend(isa), spec), tolerance_of(batch, isa)
        close(isa, ours[0], theirs[0], tolerance, tolerance)
        close(isa, ours[1], theirs[1], max(tolerance, 1e-4), max(tolerance / 10, 1e-4))
        for name in ("head_queries", "rows_selected", "rows_prefilled"):
            assert getattr(ours[2], name) == getattr(theirs[2], name), (isa, name)
        assert ours[2].rows_selected <= top_n * ours[2].head_queries, isa
        assert 0 < ours[2].rows_read <= ours[2].rows_selected, isa


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("counts", [[1], [1] * 9])
def test_threads_change_nothing(isa: str, counts: list[int]) -> None:
    """Bit for bit, where threads share a row and where each takes rows of its own."""
    batch = paged_batch(5, counts, longest=1500, head_dim=64, block_size=16, value_tier="host:N=50")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(attend(batch, backend(isa), PLAIN))
    finally:
        torch.set_num_threads(before)
    for out, _, traffic in found[1:]:
        assert torch.equal(out, found[0][0])
        assert traffic == found[0][2]


@pytest.mark.parametrize("isa", ISAS)
def test_equal_weights_choose_the_first_and_masked_kvs_are_never_read(isa: str) -> None:
    batch = paged_batch(2, [1], longest=300, kv_heads=1, value_tier="host:N=10")
    batch.q.zero_()
    out, _, traffic = attend(batch, backend(isa), PLAIN)
    cache = batch.with_own_pool()
    backend(isa).prepare(cache, batch.spans).write(1, batch.k, batch.v)
    length = int(cache.tables.lengths[batch.spans.slots[0], 1, 0])
    table = cache.tables.lookup(torch.from_numpy(batch.spans.slots), 1, -(-length // 4))
    first = cache.pool.of_layer(-1).values(cache.pool.numbers.slots_of(table[0, 0].long())[:10])
    torch.testing.assert_close(out[0], first.mean(0).expand(2, -1))
    assert (traffic.rows_selected, traffic.rows_read) == (20, 10)  # both query heads choose the same
    _, _, traffic = attend(batch, backend(isa), AttentionSpec(0.3, window=1))
    assert (traffic.rows_selected, traffic.rows_read) == (2, 1)
