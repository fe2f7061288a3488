"""The interface of budgets."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from winnow.cache import CacheLayout
from winnow.cache.layout import ceil_div
from winnow.eviction.budgets.floors import Floors
from winnow.eviction.costs import RowCosts
from winnow.eviction.ranking import Ranking
from winnow.eviction.round_rows import LayerRows


@dataclass(frozen=True)
class Budget(Floors, ABC):
    """Split of a sequence's budget, in KVs per row on average, over its rows; with floors of rows and layers."""

    needs_kinds: ClassVar[bool] = False
    """True if it uses the kinds of tokens."""

    @property
    def equal_rows(self) -> bool:
        """Return whether all rows of a sequence keep the same number."""
        return False

    @property
    def needs_similarity(self) -> bool:
        """Return whether it uses hidden states of the prompt (`RoundInputs.similarity`)."""
        return False

    @property
    def fixed(self) -> int | None:
        """Its own KVs per row, if it does not take the request's budget."""
        return None

    def pin(self, rows: LayerRows) -> Tensor | None:
        """Return further KVs of a layer to protect in this round, bool [B, H, N]; None: no further ones."""
        return None

    def layer_stats(self, rows: LayerRows) -> Tensor | None:
        """Return the statistics of a layer's KVs that `allot` needs, float32 [B, H]; each head's from its own row."""
        return None

    def costs(self, ranking: Ranking) -> RowCosts:
        """Return the costs of evicting from each row. Local to a rank: a row's costs depend on that row alone."""
        return RowCosts.of(ranking)

    @abstractmethod
    def allot(self, costs: RowCosts) -> Tensor:
        """Split the budget over the rows.

        Args:
            costs: of all heads, those of all ranks put together.

        Returns:
            KVs that each row keeps, int64 [B, L, H], the same on every rank. The planner never goes below what is
            protected.
        """

    def blocks_after(self, layout: CacheLayout, budget: int, protected: int) -> int:
        """Return an upper bound on blocks of a sequence after a round, with `protected` protected KVs in every row."""
        # Rows of uneven length waste less than one block each.
        return ceil_div(budget * layout.rows_per_seq, layout.block_size) + layout.rows_per_seq
