"""HOW KVs are read: one small interface, and the backends that compute it."""

from winnow.attention.backends import open_backend
from winnow.attention.interface import AttentionBackend, AttentionSpec, JudgedKVs
from winnow.attention.observer import AttentionObserver, Group, Pool, Term
from winnow.attention.ranked_rows import RankedRows
from winnow.attention.reference import ReferenceBackend
from winnow.attention.spans import Spans
from winnow.cache import PagedCache

__all__ = [
    "AttentionBackend",
    "AttentionObserver",
    "AttentionSpec",
    "Group",
    "JudgedKVs",
    "PagedCache",
    "Pool",
    "RankedRows",
    "ReferenceBackend",
    "Spans",
    "Term",
    "open_backend",
]
