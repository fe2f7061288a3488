"""Block sizes and warps of the kernels: one small table, so that nothing is measured while a step runs."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """How one kernel is cut: `queries` x `keys` a tile."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tuning:
    """How the kernels over rows are cut for one cache layout.

    Attributes:
        decode: its `queries` are the least rows of a tile, to which a group of query heads is padded.
        chunk: its `queries` are the rows of a tile: tokens times query heads of a group.
        observe: its `queries` are tokens.
        min_split: KVs that one program takes of a decoding row, at least; a multiple of `decode.keys`.
        max_splits: most programs for one row: the bound of the scratch for partial results.
    """

    decode: Launch
    chunk: Launch
    observe: Launch
    min_split: int = 256
    max_splits: int = 64


# By bytes of a padded key: the tiles of K and V, twice or thrice in flight, must fit into shared memory (99 KiB on
# the smallest GPUs this is meant for, compute capability 8.6; 163 KiB on A100, 227 KiB on Hopper).
_HALF = {
    128: Tuning(Launch(16, 128, 4, 3), Launch(128, 64, 8, 3), Launch(64, 64, 4, 2)),
    256: Tuning(Launch(16, 64, 4, 3), Launch(128, 64, 8, 2), Launch(64, 64, 4, 2)),
    512: Tuning(Launch(16, 32, 4, 2), Launch(64, 32, 8, 2), Launch(32, 64, 4, 2)),
}
# float32 is multiplied without tensor cores, from registers: smaller tiles.
_FULL = {
    256: Tuning(Launch(16, 32, 4, 2), Launch(32, 32, 4, 2), Launch(16, 32, 4, 1)),
    512: Tuning(Launch(16, 32, 4, 2), Launch(32, 32, 4, 1), Launch(16, 32, 4, 1)),
    1024: Tuning(Launch(16, 16, 4, 1), Launch(16, 32, 4, 1), Launch(16, 16, 4, 1)),
}


def tuning_for(head_dim: int, dtype: torch.dtype) -> Tuning:
    """The cut for keys of `head_dim` elements; beyond the table, that of its widest."""
    table = _FULL if dtype is torch.float32 else _HALF
    row_bytes = head_dim * dtype.itemsize
    return next((tuning for most, tuning in table.items() if row_bytes <= most), list(table.values())[-1])
