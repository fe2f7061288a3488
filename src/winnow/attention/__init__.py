"""HOW KVs are read: one small interface, and the backends that compute it."""

from winnow.attention.backends import open_backend
from winnow.attention.interface import AttentionBackend, AttentionSpec
from winnow.attention.observe import Group, Observe, Pool, Term
from winnow.attention.reference import ReferenceBackend
from winnow.attention.spans import Spans
from winnow.cache import PagedCache

__all__ = [
    "AttentionBackend",
    "AttentionSpec",
    "Group",
    "Observe",
    "PagedCache",
    "Pool",
    "ReferenceBackend",
    "Spans",
    "Term",
    "open_backend",
]
