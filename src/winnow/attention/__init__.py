"""HOW KVs are read: one small interface, and the backends that compute it."""

from winnow.attention.backends import open_backend
from winnow.attention.interface import AttentionBackend, AttentionSpec, Observe, PagedCache
from winnow.attention.reference import ReferenceBackend
from winnow.attention.spans import Spans

__all__ = [
    "AttentionBackend",
    "AttentionSpec",
    "Observe",
    "PagedCache",
    "ReferenceBackend",
    "Spans",
    "open_backend",
]
