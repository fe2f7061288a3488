"""WHERE KVs live: the pool of blocks, the tables that say whose they are, and the ledger that accounts for both.

The ledger is host arithmetic; what it is imported from needs no torch.
"""

from typing import TYPE_CHECKING

from winnow.cache.accounting.allocator import BlockAllocator, OutOfBlocksError
from winnow.cache.accounting.host_ledger import HostTierError
from winnow.cache.accounting.ledger import Ledger
from winnow.cache.accounting.row_tables import Demand
from winnow.cache.cache_size import CacheSize
from winnow.cache.codec import PairCodec, codec_of, make_codec
from winnow.cache.layout import CacheLayout
from winnow.cache.row_groups import BlockCount, BlockKind, RowGroup
from winnow.cache.update import BlockCopies, CacheUpdate, CopyDiscarded, RowsRestored, RowsSaved
from winnow.process.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow.cache.paged import BlockTables, LocalCache, PagedCache
    from winnow.cache.pool import KVPool

__all__ = [
    "BlockAllocator", "BlockCopies", "BlockCount", "BlockKind", "BlockTables", "CacheLayout", "CacheSize",
    "CacheUpdate", "CopyDiscarded", "Demand", "HostTierError", "KVPool", "Ledger", "LocalCache",
    "OutOfBlocksError", "PagedCache", "PairCodec", "RowGroup", "RowsRestored", "RowsSaved", "codec_of",
    "make_codec",
]  # fmt: skip

__getattr__ = lazy_exports(
    __name__,
    {
        "BlockTables": "winnow.cache.paged",
        "KVPool": "winnow.cache.pool",
        "LocalCache": "winnow.cache.paged",
        "PagedCache": "winnow.cache.paged",
    },
)
