"""What the memory of KVs holds, read back from the device: slow, for reports and checks."""

import numpy as np
import torch
from torch import Tensor

from winnow.attention import PagedCache
from winnow.cache.accounting.ledger import Holdings
from winnow.cache.layout import IntArray, ceil_div


def kept_positions(cache: PagedCache, slot: int) -> list[list[list[int]]]:
    """Return positions of the KVs in a slot's rows, by layer and head, ascending."""
    blocks, lengths = _held_blocks(cache, slot)
    held = cache.pool.numbers.positions_of(blocks).cpu().numpy()  # [L, H, N]
    return [
        [sorted(row[:length].tolist()) for row, length in zip(rows, layer.tolist(), strict=True)]
        for rows, layer in zip(held, lengths, strict=True)
    ]


def kept_weights(cache: PagedCache, slot: int) -> list[list[float]]:
    """Return the sum of e^bias of the KVs that each row of a slot holds, by layer and head."""
    blocks, lengths = _held_blocks(cache, slot)
    if not cache.pool.layout.has_bias:
        return lengths.astype(float).tolist()
    pools = map(cache.pool.of_layer, range(len(blocks)))
    bias = torch.stack([pool.biases_of(row) for pool, row in zip(pools, blocks, strict=True)])
    ends = torch.from_numpy(lengths).to(bias.device)[..., None]
    within = torch.arange(bias.shape[-1], device=bias.device) < ends
    return bias.exp().masked_fill(~within, 0.0).sum(dim=-1).tolist()


def _held_blocks(cache: PagedCache, slot: int) -> tuple[Tensor, IntArray]:
    """Return the blocks of a slot's rows, int64 [L, H, n], and their lengths, [L, H]."""
    tables, lengths = cache.tables, cache.tables.host_lengths[slot]
    most = ceil_div(int(lengths.max()), cache.pool.layout.block_size)
    slots = torch.tensor([slot], device=tables.pages.device)
    return tables.lookup_layers(slots, most)[:, 0].long(), lengths


def check_contents(cache: PagedCache, held: Holdings) -> None:
    """Assert that memory agrees with the ledger, all of whose updates have been applied."""
    tables, host = cache.tables, cache.host
    same = host is not None and host.host_ids == held.host_ids == cache.states.host_ids
    assert host is not None and same, "the host tier holds other copies than the ledger counts"
    assert host.nbytes <= held.host_bytes, "the host tier holds more bytes than the ledger counts"
    assert np.array_equal(tables.host_lengths, held.lengths), "lengths differ from the ledger's"
    assert np.array_equal(tables.lengths.cpu().numpy(), held.lengths), "lengths differ on the device"
    for slot, pages in held.pages.items():
        own = tables.page_table[slot, : len(pages)].cpu().numpy()
        assert np.array_equal(own, pages), "a page table differs from the ledger's"
        blocks, lengths = _held_blocks(cache, slot)
        filled = np.arange(blocks.shape[-1]) < cache.pool.layout.row_blocks(lengths)[..., None]
        found = blocks.cpu().numpy()[filled]
        assert np.array_equal(found, held.blocks[slot]), "a block table differs from the ledger's"
