"""What a budget is: how many KVs each row keeps."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from winnow.cache import CacheLayout
from winnow.cache.layout import ceil_div
from winnow.eviction.budgets.floors import Floors
from winnow.eviction.costs import RowCosts
from winnow.eviction.ranking import Ranking
from winnow.eviction.rows import LayerRows


@dataclass(frozen=True)
class Budget(Floors, ABC):
    """Who keeps how much of a sequence's budget, which counts KVs per row on average; and floors of rows and layers."""

    needs_kinds: ClassVar[bool] = False
    """Whether the tokens' kinds matter."""

    @property
    def equal_rows(self) -> bool:
        """Whether all rows of a sequence keep the same number."""
        return False

    @property
    def needs_similarity(self) -> bool:
        """Whether hidden states must be watched while the prompt is computed."""
        return False

    @property
    def fixed(self) -> int | None:
        """The only budget it knows, if it takes none from the request."""
        return None

    def pin(self, rows: LayerRows) -> Tensor | None:
        """KVs of a layer that must stay in this round besides the protected ones, bool [B, H, N]."""
        return None

    def layer_stats(self, rows: LayerRows) -> Tensor | None:
        """Statistics of a layer's KVs that `allot` needs, float32 [B, H]; each head's from its own row."""
        return None

    def costs(self, ranking: Ranking) -> RowCosts:
        """The costs of evicting from each row. Local to a rank: a row's costs depend on that row alone."""
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
        """Most blocks that a sequence holds after a round, with so many protected KVs in every row."""
        # Rows that differ waste less than one block each.
        return ceil_div(budget * layout.rows_per_seq, layout.block_size) + layout.rows_per_seq
