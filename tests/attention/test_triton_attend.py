"""Attention, write and compact of the Triton backend against the reference; real shapes where there is a GPU."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scaled_keys import ScaledKeys
from tests.attention.paged import contents_of, with_codec
from triton_case import DEVICE, SMALL, TOLERANCE, build, compare, compute

from winnow.attention import (
    AttentionObserver,
    AttentionSpec,
    PagedCache,
    ReferenceBackend,
    Spans,
    backends,
    open_backend,
)
from winnow.attention.triton import TritonBackend, attend
from winnow.attention.triton.launch import product_dtype, tuning_for
from winnow.cache import CacheLayout, KVPool, PairCodec, codec_of
from winnow.errors import ConfigError

SPECS = {
    "plain": AttentionSpec(0.4),
    "window, sinks": AttentionSpec(0.4, 9, sinks=torch.linspace(-1, 2, 6, device=DEVICE)),
    "softcap, slopes": AttentionSpec(1.0, softcap=1.5, slopes=0.5 ** torch.arange(6, device=DEVICE)),
}
ALL = AttentionSpec(1.0, 9, 1.5, SPECS["window, sinks"].sinks, SPECS["softcap, slopes"].slopes, chunked=True)
# One token each, chunks of less and more than a tile, and both.
BATCHES = {"decode": [1, 1, 1, 1], "chunks": [2, 23], "mixed": [1, 1, 1, 7, 12]}


@pytest.mark.parametrize(
    ("counts", "spec"),
    [(BATCHES["mixed"], spec) for spec in SPECS.values()]
    + [(BATCHES["decode"], ALL), (BATCHES["chunks"], ALL)],
    ids=[*SPECS, "all, decode", "all, chunks"],
)
def test_equals_the_reference(counts: list[int], spec: AttentionSpec) -> None:
    compare(build(len(counts), counts), spec)


@pytest.mark.parametrize("feature", ["window", "softcap", "sinks", "scale", "slopes", "chunked"])
@pytest.mark.parametrize("counts", [BATCHES["decode"], BATCHES["chunks"]], ids=["decode", "chunks"])
def test_a_feature_left_out_would_be_noticed(feature: str, counts: list[int]) -> None:
    case, none = build(1, counts), dict[str, Any](scale=0.9, chunked=False)
    without = replace(ALL, **{feature: none.get(feature)})
    found, expected = (compute(ReferenceBackend(), case, spec).out for spec in (without, ALL))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(
            found, expected, rtol=TOLERANCE[case.q.dtype], atol=TOLERANCE[case.q.dtype]
        )


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.bfloat16, {"kv_heads": 1, "group": 1, "head_dim": 20, "block_size": 5}),
        (torch.float16, {"kv_heads": 3, "group": 17}),
    ],
    ids=["d20", "g17"],
)
def test_low_precision_and_odd_shapes(dtype: torch.dtype, sizes: dict[str, int]) -> None:
    compare(build(7, [1, 1, 5], dtype=dtype, **sizes), AttentionSpec(0.3, softcap=2.0))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_activations_and_kvs_may_differ_in_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    case = build(7, [1, 1, 5], dtype=dtype, kv_dtype=kv_dtype, observe=[AttentionObserver()] * 3)
    assert (case.q.dtype, case.cache.pool.of_layer(-1).k.dtype) == (dtype, kv_dtype)
    compare(case, AttentionSpec(0.3, softcap=2.0))


def test_products_hold_activations_and_kvs_exactly() -> None:
    formats = {
        (torch.bfloat16, torch.bfloat16): torch.bfloat16,
        (torch.float16, torch.bfloat16): torch.float32,
    }
    for (dtype, kv_dtype), products in formats.items():
        assert product_dtype(torch.empty(1, dtype=dtype), codec_of(kv_dtype)) == products


def test_a_row_does_not_feel_the_batch() -> None:
    """To the bit: what is kept of a sequence must not depend on who else is computed."""
    case = build(11, [1, 1, 1], longest=90)
    backend = TritonBackend(SMALL)
    together = compute(backend, case, ALL).out
    slots, spans = case.spans.slots.tolist(), case.spans
    for i, slot in enumerate(slots):
        alone = Spans.build([slot], [int(spans.first_position[i])], [1], spans.lengths[i : i + 1], DEVICE)
        cache = case.with_own_pool()
        backend.prepare(cache, alone).write(case.layer, case.k[i : i + 1], case.v[i : i + 1])
        out = backend.prepare(cache, alone).attend(case.layer, case.q[i : i + 1], ALL)
        assert torch.equal(out[0], together[i])


@pytest.mark.parametrize("nobody", [False, True])
def test_an_empty_sequence_fills_a_batch(nobody: bool) -> None:
    """What a captured step is padded with: nothing is written, and zeros come out."""
    case = build(13, [1, 1], observe=[AttentionObserver()] * 2)
    if nobody:
        case.spans.slots[1] = -1
    else:
        slot = int(case.spans.slots[1])
        case.cache.tables.set_lengths(np.array([slot]), np.zeros_like(case.cache.tables.host_lengths[[slot]]))
    found = compute(TritonBackend(SMALL), case, SPECS["plain"])
    assert found.out[0].any() and not found.out[1].any()
    written = found.pool.position != case.cache.pool.position
    assert written.sum() <= case.k.shape[1]  # one new KV for each head of the other sequence


@pytest.mark.parametrize("moves", [0, 3, 37])
@pytest.mark.parametrize("kv_format", ["bfloat16", "k=int8,v=fp8_e4m3", ScaledKeys()], ids=str)
@pytest.mark.parametrize("head_dim", [8, 5])
def test_compact_moves_all_of_a_kv(moves: int, kv_format: PairCodec | str, head_dim: int) -> None:
    pool = KVPool(CacheLayout.even(1, 1, head_dim, 4, kv_format, num_accumulators=2), 25, DEVICE)
    slots = torch.arange(100, device=DEVICE)
    pool.of_layer(-1).write(
        slots, *torch.randn(2, 100, head_dim, device=DEVICE), torch.randint(1000, (100,), device=DEVICE)
    )
    pool.accumulators.normal_()
    expected = copy.deepcopy(pool)
    source, target = torch.randperm(100, device=DEVICE)[: 2 * moves].chunk(2) if moves else [
        torch.empty(0, dtype=torch.int64, device=DEVICE)
    ] * 2  # fmt: skip
    TritonBackend().compact(pool, source, target)
    ReferenceBackend().compact(expected, source, target)
    for found, wanted in zip(contents_of(pool), contents_of(expected), strict=True):
        assert torch.equal(found, wanted)


def test_kvs_that_kernels_cannot_read_are_refused() -> None:
    case = build(7, [1, 5])
    layout = with_codec(case.cache.pool.layout, ScaledKeys())
    cache = PagedCache(KVPool(layout, case.cache.pool.num_blocks, DEVICE), case.cache.tables)
    backend = TritonBackend()
    with pytest.raises(ConfigError, match=r"triton reads KVs stored as one of float32, .*, got scaled"):
        backend.prepare(cache, case.spans).write(case.layer, case.k, case.v)
    with pytest.raises(ConfigError, match=r"triton reads KVs stored as one of float32, .*, got scaled"):
        backend.prepare(cache, case.spans).attend(case.layer, case.q, AttentionSpec(1.0))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make test-gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_real_shapes(dtype: torch.dtype, group: int, head_dim: int) -> None:
    sizes = {"longest": 3000, "kv_heads": 4, "group": group, "head_dim": head_dim, "block_size": 16}
    case = build(17, [1] * 20 + [3, 130, 512], dtype=dtype, **sizes)
    sinks = torch.linspace(-1, 2, 4 * group, device=DEVICE)
    for spec in (AttentionSpec(head_dim**-0.5), AttentionSpec(head_dim**-0.5, 700, 5.0, sinks)):
        compare(case, spec, tuning=None)


def test_scratch_for_logits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_RAW_BYTES", 4 * 6 * 60)  # one row of 60 KVs
    lengths = build(3, [1, 1, 1]).spans.lengths
    parts = list(attend._parts(lengths, [0, 1, 2], 6))
    assert sorted(i for part in parts for i in part) == [0, 1, 2] and len(parts) > 1
    assert all(len(part) == 1 or lengths[part].max() * len(part) <= 60 for part in parts)


def test_few_rows_take_shorter_splits() -> None:
    """One row of 4,096 KVs with 8 heads: 128 programs in place of 32, on an H100."""
    tuning = tuning_for(128, torch.bfloat16, 90)
    sizes = {(rows, n): tuning.split_of(8 * rows, n, 132) for rows in (1, 8, 64) for n in (100, 4096, 32768)}
    assert sizes[1, 4096] == 256 and sizes[1, 32768] == 512 and sizes[64, 4096] == tuning.min_split == 1024
    assert sizes[8, 4096] == 512 and sizes[1, 100] == 256
    assert all(split % tuning.decode.keys == 0 for split in sizes.values())
    wider = tuning_for(512, torch.bfloat16, 90)
    assert wider == tuning_for(256, torch.bfloat16, 80), (
        "tiles that fit where rows are wider than the table's"
    )


def test_is_opened_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_backend("triton", DEVICE), TritonBackend)
    assert isinstance(open_backend("auto", "cuda"), TritonBackend)
    assert not isinstance(open_backend("auto", "cpu"), TritonBackend)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="needs a GPU, got device cpu"):
        open_backend("triton", "cpu")
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="package triton is not installed"):
        open_backend("triton", DEVICE)
    with pytest.warns(UserWarning, match="many times slower"):
        assert isinstance(open_backend("auto", "cuda"), ReferenceBackend)
