"""Queries of different lengths as one padded batch, padded on the left so that all end in the same column."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from winnow.padded.cache import PaddedCache
from winnow.padded.model import PaddedModel, span_mask


@dataclass(frozen=True)
class PaddedInputs:
    """A model's inputs for a group that starts with an empty cache; all int64 [rows, width]."""

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    padding: list[int]
    """Columns before each query."""

    @classmethod
    def of(cls, queries: Sequence[Sequence[int]], device: torch.device) -> Self:
        """Pad token ids."""
        width = max(map(len, queries))
        padding = [width - len(query) for query in queries]
        # Masked values are still multiplied: pad a query with its own first token, so that it cannot be affected by
        # faults of another token (NaN in its embedding).
        tokens = [[query[0]] * pad + list(query) for pad, query in zip(padding, queries, strict=True)]
        own = torch.arange(width, device=device) - torch.tensor(padding, device=device)[:, None]
        mask = span_mask([(pad, width) for pad in padding], width, device)
        return cls(torch.tensor(tokens, device=device), own.clamp_min(0), mask, padding)

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def counts(self, first: int, last: int) -> list[int]:
        """Return the number of tokens of each query within a range of columns."""
        return [min(max(last - pad, 0), last - first) for pad in self.padding]

    def forward(
        self, model: PaddedModel, cache: PaddedCache, first: int, last: int, keep: list[int] | None
    ) -> Tensor:
        """Compute a range of columns into the cache, which holds those before. Returns as `PaddedModel.forward`."""
        columns = slice(first, last)
        logits = model.forward(
            cache, self.tokens[:, columns], self.positions[:, columns], self.mask[:, :last], keep
        )
        cache.advance(self.counts(first, last))
        return logits
