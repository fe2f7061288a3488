"""The interface of budgets."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from winnow.cache import CacheLayout
from winnow.cache.layout import ceil_div
from winnow.eviction.budgets.floors import Floors
from winnow.eviction.costs import RowCosts
from winnow.eviction.ranking import Ranking


@dataclass(frozen=True)
class Budget(Floors, ABC):
    """Split of a sequence's budget, in KVs per row on average, over its rows; with floors of rows and layers."""

    @property
    def equal_rows(self) -> bool:
        """Return whether all rows of a sequence keep the same number."""
        return False

    @property
    def fixed(self) -> int | None:
        """Its own KVs per row, if it does not take the request's budget."""
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
