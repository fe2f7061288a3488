"""Copies in host memory are the same bytes, whatever the codec, and what fails to be copied fails alone."""

import numpy as np
import pytest
import torch

from winnow.cache import (
    BlockCopies,
    CacheLayout,
    CacheSize,
    CacheUpdate,
    CopyDiscarded,
    HostTierError,
    PagedCache,
    RowsRestored,
    RowsSaved,
)
from winnow.cache.codec import make_codec
from winnow.values.kv_dtype import KVDtype

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def cache_of(
    block_size: int, kv_format: str, num_accumulators: int, device: str = "cpu", host_bytes: int = 10**6
) -> PagedCache:
    layout = CacheLayout.even(2, 2, 32, block_size, make_codec(KVDtype.parse(kv_format)), num_accumulators)
    size = CacheSize.of_blocks(layout, 24, 2, 64)
    cache = PagedCache.allocate(layout, size, device, host_bytes)
    chance = torch.Generator().manual_seed(block_size)
    for part in (cache.pool.of_layer(-1).storage, cache.pool.position, cache.pool.accumulators):
        raw = part.view(torch.uint8)  # any bits, of numbers or not
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=chance))
    return cache


def content(cache: PagedCache, blocks: list[int]) -> list[torch.Tensor]:
    return [part.pieces[0][blocks].view(torch.uint8).cpu() for part in cache.pool.kinds[0].parts]


def apply(cache: PagedCache, *copies: BlockCopies | RowsSaved | RowsRestored | CopyDiscarded) -> None:
    cache.apply(CacheUpdate(copies=copies))


def ints(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_accumulators", [0, 1, 2])
@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8", "int3", "k=int8,v=int4"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_come_back_bit_by_bit(
    block_size: int, kv_format: str, num_accumulators: int, device: str
) -> None:
    cache = cache_of(block_size, kv_format, num_accumulators, device)
    source, target = [7, 3, 11, 20, 5], [1, 2, 11, 4, 6]
    before, others = content(cache, source), content(cache, [0, 8, 9, 21])
    apply(cache, RowsSaved(0, 0, ints(*source)))
    for part in cache.pool.kinds[0].parts:
        part.pieces[0][source] = 0
    apply(cache, RowsRestored(0, 1, ints(*target)))
    for found, expected in zip(content(cache, target), before, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(content(cache, [0, 8, 9, 21]), others, strict=True):
        assert torch.equal(found, expected)
    assert cache.host is not None
    assert cache.host.nbytes == cache.pool.layout.host_bytes([5])
    apply(cache, CopyDiscarded(0))
    assert not cache.host.nbytes and not cache.host.host_ids


def test_equal_blocks_give_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between the parts, where memory is not written by copies."""
    cache = cache_of(1, "bfloat16", 2)
    assert cache.host is not None
    empty, fills = torch.empty, iter([0x55, 0xAA])
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(next(fills)))
    assert torch.equal(cache.host.read(ints(3, 5, 9)), cache.host.read(ints(3, 5, 9)))


def test_changes_are_made_in_their_order() -> None:
    cache = cache_of(4, "float32", 1)
    one, two = content(cache, [1]), content(cache, [2])
    # 1 is saved before 2 is copied over it, and what is saved then is 2; the first copy makes room for the third.
    assert cache.host is not None
    cache.host.limit = 2 * cache.pool.layout.host_bytes([1])
    apply(
        cache,
        RowsSaved(0, 0, ints(1)),
        BlockCopies(ints(2), ints(1)),
        RowsSaved(0, 1, ints(1)),
        RowsRestored(0, 1, ints(9)),
        CopyDiscarded(0),
        RowsSaved(0, 2, ints(9)),
        RowsRestored(1, 1, ints(10)),
        RowsRestored(2, 1, ints(12)),
    )
    for place, expected in ((1, two), (9, one), (10, two), (12, one)):
        assert all(torch.equal(a, b) for a, b in zip(content(cache, [place]), expected, strict=True))


def test_what_finds_no_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(4, "float32", 1)
    kept = content(cache, [5, 6])
    empty = torch.empty

    def refuse(*args: int, **options: object) -> torch.Tensor:
        if args == (cache.pool.layout.host_bytes([3]),):
            raise RuntimeError("not enough memory")
        return empty(*args, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(HostTierError, match="not enough memory") as failure:
        apply(
            cache,
            RowsSaved(0, 0, ints(1, 2, 3)),
            RowsSaved(1, 1, ints(5, 6)),
            RowsRestored(0, 0, ints(14, 15, 16)),
            RowsRestored(1, 0, ints(17, 18)),
        )
    assert failure.value.host_ids == {0}
    assert all(torch.equal(a, b) for a, b in zip(content(cache, [17, 18]), kept, strict=True))


def test_more_than_the_limit_is_not_taken() -> None:
    cache = cache_of(4, "float32", 1, host_bytes=CacheLayout.even(2, 2, 32, 4, "float32", 1).host_bytes([3]))
    apply(cache, RowsSaved(0, 0, ints(1, 2)))
    with pytest.raises(HostTierError):
        apply(cache, RowsSaved(0, 1, ints(3, 4)))
    apply(cache, RowsSaved(0, 2, ints(3)))
    assert cache.host is not None and cache.host.host_ids == {0, 2}
