"""Bytes: what a cache costs is known before it exists, to the last table."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from winnow.cache import CacheLayout, CacheSize, Ledger, PagedCache
from winnow.errors import ConfigError
from winnow.values.kv_dtype import WideParts


def test_block_bytes_by_hand() -> None:
    # 16 slots x (2 vectors x 64 x 2 bytes + 4 bytes of position + 2 scores x 4 bytes)
    layout = CacheLayout.even(32, 8, 64, 16, torch.bfloat16, num_accumulators=2)
    assert layout.block_bytes == 16 * (2 * 64 * 2 + 4 + 8) == 4288
    assert layout.rows_per_seq == 256
    assert layout.blocks_for(17) == 2 * 256


@given(
    layers=st.integers(1, 6),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([4, 16, 64]),
    block_size=st.sampled_from([1, 4, 16, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_accumulators=st.integers(0, 2),
    kibibytes=st.integers(64, 4096),
    max_num_seqs=st.integers(1, 40),
    max_model_len=st.integers(1, 5000),
)
def test_tensors_cost_what_was_planned(
    layers: int,
    heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    num_accumulators: int,
    kibibytes: int,
    max_num_seqs: int,
    max_model_len: int,
) -> None:
    layout = CacheLayout.even(layers, heads, head_dim, block_size, dtype, num_accumulators)
    try:
        size = CacheSize.fit(layout, kibibytes * 1024, max_num_seqs, max_model_len)
    except ConfigError:
        return
    ledger, cache = Ledger(layout, size), PagedCache.allocate(layout, size)
    assert cache.nbytes + ledger.nbytes == size.nbytes(layout) <= kibibytes * 1024
    # not one more block would fit, unless no sequence could ever use it
    more = CacheSize.of_blocks(layout, size.num_blocks + 1, max_num_seqs, max_model_len)
    enough = size.num_blocks == max_num_seqs * layout.blocks_for(max_model_len)
    assert enough or more.nbytes(layout) > kibibytes * 1024


def test_equal_rows_never_run_out_of_pages_first() -> None:
    layout = CacheLayout.even(2, 2, 8, 4, torch.float32)
    ledger = Ledger(layout, CacheSize.fit(layout, 100_000, 6, 1000))
    slots = [ledger.open() for _ in range(6)]
    while ledger.demand(slots, [1] * 6).blocks <= ledger.allocator.num_free:
        assert ledger.has_room_for(ledger.demand(slots, [1] * 6))
        ledger.append(slots, [1] * 6)
    ledger.check_integrity()


def test_too_little_memory_names_the_least() -> None:
    layout = CacheLayout.even(4, 2, 64, 16, torch.float32)
    with pytest.raises(ConfigError, match=r"kv_memory must be at least .* bytes\) .* got 1\.0 KiB"):
        CacheSize.fit(layout, 1024, 4, 100)


@pytest.mark.parametrize("wide", [WideParts(), WideParts(layers=1, sinks=2)])
@pytest.mark.parametrize("state_bytes", [0, 100])
def test_memory_beyond_what_sequences_fill_belongs_to_prefixes(wide: WideParts, state_bytes: int) -> None:
    """Twice the memory holds about twice the prefixes, though no more sequences run; without them it is left."""
    layout = replace(CacheLayout.even(2, 2, 8, 4, torch.float32), wide=wide, state_bytes=state_bytes)
    sequences, longest = 3, 256
    most = sequences * layout.blocks_for(longest)
    memory = 4 * CacheSize.of_blocks(layout, most, sequences, longest).nbytes(layout)
    alone = CacheSize.fit(layout, memory, sequences, longest)
    shared, double = (
        CacheSize.fit(layout, each * memory, sequences, longest, shares_prefixes=True) for each in (1, 2)
    )
    assert alone.num_blocks == most and shared.num_blocks > 3 * most
    assert double.num_blocks > 1.9 * shared.num_blocks and double.nbytes(layout) <= 2 * memory
    # Each token that the blocks hold finds room for what a prefix keeps beside them.
    tokens = double.num_blocks // layout.rows_per_seq * layout.block_size
    each = layout.link_state_bytes(0, longest, resumable=True)
    assert double.prefix_state_bytes(layout) >= each * (tokens // longest)
