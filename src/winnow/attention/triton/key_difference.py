"""Launches that compare the keys of rows with their mean direction."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from winnow.attention.triton.kernels.key_difference import compare_keys
from winnow.attention.triton.launch import padded
from winnow.attention.triton.side_format import key_format
from winnow.cache.pool import KindPool

# KVs of a program: few, so that short contexts fill a GPU; enough for partial sums to be small beside the keys.
_TILE = 256
# Numbers that a program loads at once.
_LOADED = 4096


@dataclass(frozen=True)
class Turn:
    """Dimensions that a rotation turns in pairs, a constant with which kernels are compiled.

    Attributes:
        stride: of the positions in the tables of cosines and sines.
        block_pairs, block_rest: extents of tiles of pairs, and of dimensions that are not turned.
    """

    pairs: int
    first: int
    interleaved: bool
    stride: int
    block_pairs: int
    block_rest: int


def key_difference(
    pool: KindPool, slot: Tensor, position: Tensor, length: Tensor, sums: Tensor, counted: Tensor,
    cos: Tensor, sin: Tensor, pairs: int, first: int, interleaved: bool,
) -> Tensor:  # fmt: skip
    """Return minus the cosine of each key before rotation and its row's sum: float32 [B, H, N], zeros past the length.

    Args:
        slot: int64 [B, H, N], the slots of each row; position: int32 [B, H, N]; length: int32 [B, H].
        sums: float32 [B, H, d], sums of directions, to which keys at positions from `counted`, int32 [B], on are added
            in place.
        cos, sin: float32 [P, stride], the rotation of `pairs` pairs of dimensions from `first` on, at each position.
        interleaved: pairs are neighbours; False: dimensions `pairs` apart.
    """
    (batch, heads, longest), dim = slot.shape, pool.kind.key_size
    grid = batch * heads, triton.cdiv(longest, _TILE)
    blocks = (triton.next_power_of_2(max(n, 1)) for n in (pairs, dim - 2 * pairs))
    partial, score = (slot.new_zeros(n, dtype=torch.float32) for n in ((*grid, dim), slot.shape))
    common = {
        "storage": pool.storages[0].data,
        "slots": slot.contiguous(),
        "positions": position.contiguous(),
        "lengths": length.contiguous(),
        "cosines": cos.to(slot.device),  # without pairs they may be elsewhere, and empty
        "sines": sin.to(slot.device),
        "first_slot": pool.first * pool.kind.size,
        "stride": longest,
        "KV_HEADS": heads,
        "KEY": key_format(pool.kind),
        "TURN": Turn(pairs, first, interleaved, cos.shape[1], *blocks),
        "TILE": _TILE,
        "BLOCK_N": min(_TILE, max(1, _LOADED // padded(dim))),
        "num_warps": 4,
    }
    with torch.cuda.device_of(slot):
        compare_keys[grid](counted=counted, sums=None, target=partial, **common)
        sums.add_(partial.sum(dim=1).view_as(sums))
        compare_keys[grid](counted=None, sums=sums.contiguous(), target=score, **common)
    return score
