"""`benchmarks.demotion` and `benchmarks.symmetric_codes`: equal bytes, what tiers do to KVs, and the tables."""

from typing import Any

import pytest
import torch

from benchmarks.demotion import Mix, _round_trip, mixes, tables
from benchmarks.symmetric_codes import asymmetric, error, symmetric
from winnow.cache import CacheLayout, KVPool, codec_of


def test_all_mixes_of_a_size_take_the_same_bytes() -> None:
    whole = Mix(("bfloat16",)).kv_bytes(64)
    assert whole == 4 * 64 + 4
    assert Mix(("int8", "int4"), 0.25).kv_bytes(64) == 0.25 * (2 * 66 + 4) + 0.75 * (2 * 40 + 4)
    for group in mixes():
        found = {mix.compression(8.0, 64): mix for mix in group}
        assert len(found) == len(group), "a round tells them apart by how much stays"
        for compression, mix in found.items():
            assert mix.kv_bytes(64) / compression == pytest.approx(whole / 8)


def test_kvs_of_a_tier_become_what_its_format_decodes_to() -> None:
    pool = KVPool(CacheLayout(1, 1, 32, 4, "float32"), 2)
    k, v = torch.randn(2, 8, 32)
    pool.write(torch.arange(8), k, v, torch.arange(8))
    codec = codec_of("k=int8,v=int2")
    _round_trip(pool, codec, torch.tensor([1, 6]))
    narrow = [1, 6]
    fields = {name: x[narrow] for name, x in codec.encode(k, v).items()}
    torch.testing.assert_close(pool.keys(torch.tensor(narrow)), codec.keys(fields), atol=2e-3, rtol=2e-3)
    rest = [0, 2, 3, 4, 5, 7]
    assert torch.equal(pool.keys(torch.tensor(rest)), k[rest])
    assert not torch.equal(pool.values(torch.tensor(narrow)), v[narrow])
    assert torch.equal(pool.values(torch.tensor(rest)), v[rest])


def row(fewer: float | None, formats: tuple[str, ...], *scores: float) -> dict[str, Any]:
    mix = None if fewer is None else {"formats": formats, "share": 1.0 if len(formats) == 1 else 0.5}
    return {
        "work": "demo single",
        "fewer": fewer,
        "mix": mix,
        "scores": {f"{i}/0": score for i, score in enumerate(scores)},
    }


def test_ladders_are_compared_with_the_best_that_only_evicts() -> None:
    rows = [
        row(None, (), 1.0, 1.0),
        row(8.0, ("int8",), 0.0, 0.0),
        row(8.0, ("int4",), 1.0, 0.0),
        row(8.0, ("int8", "int4"), 1.0, 1.0),
    ]
    full, at_eight = tables(rows, 0.5)
    assert full.rows == (("full cache", ("1.000", "+0.0 ± 0.0", "1.00")),)
    assert [entries[:2] for _, entries in at_eight.rows] == [
        ("0.000", "-50.0 ± 50.0"),
        ("0.500", "+0.0 ± 0.0"),
        ("1.000", "+50.0 ± 50.0"),
    ]


def test_symmetric_codes_lose_more_at_equal_bytes() -> None:
    """A scale for 32 channels takes what a scale and a min for 64 do."""
    x = torch.randn(3, 50, 64, generator=torch.Generator().manual_seed(0))
    for bits in (4, 3, 2):
        assert (
            error(x, asymmetric(x, bits, 32))
            < error(x, asymmetric(x, bits, 64))
            < error(x, symmetric(x, bits, 32))
        )
    assert error(x, symmetric(x, 8, 64)) < 0.01
