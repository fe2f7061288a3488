"""Tile sizes and warps of the kernels, from a table: nothing is autotuned while a step runs."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """Launch parameters of one kernel; a tile is `queries` x `keys`."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of the kernels over rows for one cache layout.

    Attributes:
        decode: `queries` is the minimum of rows in a tile, to which a group of query heads is padded.
        chunk: `queries` is the number of rows in a tile: tokens times query heads of a group.
        observe: `queries` is a number of tokens.
        min_split: minimum of KVs that one program takes of a decoding row; a multiple of `decode.keys`.
        max_splits: maximum of programs for one row, which bounds the scratch for partial results.
    """

    decode: Launch
    chunk: Launch
    observe: Launch
    min_split: int = 256
    max_splits: int = 64


# By bytes of a padded key: two or three stages of the tiles of K and V must fit into shared memory (99 KiB on the
# smallest supported GPUs, compute capability 8.6; 163 KiB on A100, 227 KiB on Hopper).
_HALF = {
    128: Tuning(Launch(16, 128, 4, 3), Launch(128, 64, 8, 3), Launch(64, 64, 4, 2)),
    256: Tuning(Launch(16, 64, 4, 3), Launch(128, 64, 8, 2), Launch(64, 64, 4, 2)),
    512: Tuning(Launch(16, 32, 4, 2), Launch(64, 32, 8, 2), Launch(32, 64, 4, 2)),
}
# float32 is multiplied in registers, without tensor cores: smaller tiles.
_FULL = {
    256: Tuning(Launch(16, 32, 4, 2), Launch(32, 32, 4, 2), Launch(16, 32, 4, 1)),
    512: Tuning(Launch(16, 32, 4, 2), Launch(32, 32, 4, 1), Launch(16, 32, 4, 1)),
    1024: Tuning(Launch(16, 16, 4, 1), Launch(16, 32, 4, 1), Launch(16, 16, 4, 1)),
}


def tuning_for(head_dim: int, dtype: torch.dtype) -> Tuning:
    """Return the parameters for `head_dim` and the dtype of products; beyond the table, those of its widest entry."""
    table = _FULL if dtype is torch.float32 else _HALF
    row_bytes = head_dim * dtype.itemsize
    return next((tuning for most, tuning in table.items() if row_bytes <= most), list(table.values())[-1])
