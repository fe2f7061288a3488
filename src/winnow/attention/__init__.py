"""Attention over the paged cache: the backend interface and its implementations."""

from winnow.attention.backends import open_backend
from winnow.attention.interface import (
    AttentionBackend,
    AttentionSpec,
    BackendStep,
    HeadRotation,
    JudgedKVs,
    ReplayQueries,
)
from winnow.attention.observer import AttentionObserver, Group, Smoothing, Term
from winnow.attention.ranked_rows import RankedRows
from winnow.attention.reference import ReferenceBackend
from winnow.attention.spans import Spans
from winnow.cache import PagedCache

__all__ = [
    "AttentionBackend", "AttentionObserver", "AttentionSpec", "BackendStep", "Group", "HeadRotation",
    "JudgedKVs", "PagedCache", "RankedRows", "ReferenceBackend", "ReplayQueries", "Smoothing", "Spans",
    "Term", "open_backend",
]  # fmt: skip
