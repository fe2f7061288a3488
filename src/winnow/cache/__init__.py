"""WHERE KVs live: the pool of blocks, the tables that say whose they are, and the accounting of both."""

from winnow.cache.allocator import BlockAllocator, OutOfBlocksError
from winnow.cache.codec import KVCodec, codec_of
from winnow.cache.layout import CacheLayout, CacheSize
from winnow.cache.manager import BlockCopies, CacheManager, Demand
from winnow.cache.pool import KVPool
from winnow.cache.tables import BlockTables

__all__ = [
    "BlockAllocator",
    "BlockCopies",
    "BlockTables",
    "CacheLayout",
    "CacheManager",
    "CacheSize",
    "Demand",
    "KVCodec",
    "KVPool",
    "OutOfBlocksError",
    "codec_of",
]
