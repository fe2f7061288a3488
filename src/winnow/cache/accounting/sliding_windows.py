"""Blocks that sliding windows have passed."""

import numpy as np

from winnow.cache.layout import CacheLayout, IntArray


class SlidingWindows:
    """The windows of a layout's layers.

    Attributes:
        any: whether any layer has one.
    """

    def __init__(self, layout: CacheLayout) -> None:
        windows = layout.windows or (None,) * layout.num_layers
        self.any = layout.has_windows
        self._block_size = layout.block_size
        self._has_window = np.array([window is not None for window in windows])
        self._windows = np.array([window or 1 for window in windows], dtype=np.int64)

    def num_passed(self, lengths: IntArray) -> IntArray:
        """Return blocks at the front of rows that no later token sees, int64 [B, layers].

        Args:
            lengths: [B, layers], the last KVs of a sequence in order; heads of a layer are alike.
        """
        # The next token sees itself, and window - 1 KVs before it.
        passed = np.maximum(lengths - (self._windows - 1), 0)
        return np.where(self._has_window, passed // self._block_size, 0)
