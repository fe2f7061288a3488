"""Rows of logits in blocks, so that temporary memory does not grow with the batch."""

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**22  # 16 MiB of float32: 128 rows of a 32k vocabulary, 27 rows of a 152k one
_HUGE = 1e30  # stands for +inf: far above any logit, and stays finite through every penalty


def row_blocks(num_rows: int, vocab_size: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of consecutive blocks: at most about 4 million logits each, at least one row."""
    size = max(1, _BLOCK_ELEMENTS // vocab_size)
    for first in range(0, num_rows, size):
        yield first, min(first + size, num_rows)


def clean_rows(logits: Tensor) -> Tensor:
    """Return a float32 copy where NaN counts as impossible (-inf), and +inf as all but certain, yet a number."""
    return torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=_HUGE, neginf=-torch.inf)
