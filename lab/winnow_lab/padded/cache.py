"""The batch's KVs: padded tensors per layer, of which a window of columns is in use.

Every row ends at the window's last column, so within a row the distance between columns equals the distance between
tokens, whatever its padding. Sliding windows and ALiBi, which models compute from columns, are therefore correct. A
step writes after the window, and cutting padding off its front changes one number. Columns are copied only when the
window reaches the end of its tensors, into tensors of the size needed then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class LayerShape:
    """A token's KVs in one layer: a key and a value per head."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class KVShape:
    """A token's KVs in all layers."""

    layers: tuple[LayerShape, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @cached_property
    def largest_layer(self) -> int:
        """Bytes of one token in the largest layer."""
        return max(layer.nbytes for layer in self.layers)


@dataclass(frozen=True)
class Shape:
    rows: int
    columns: int


@dataclass
class Window:
    """The part of the tensors that is in use: rows 0 to `rows`, columns `start` to `end`."""

    rows: int = 0
    start: int = 0
    end: int = 0

    @property
    def columns(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class QueryKVs:
    """The KVs of one query: copies, or views into a batch. Samples of a prompt may share them.

    Attributes:
        layers: keys [heads, n, key_dim] and values [heads, n, value_dim].
    """

    layers: tuple[tuple[Tensor, Tensor], ...]

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(tuple((change(keys), change(values)) for keys, values in self.layers))

    def on_host(self) -> Self:
        """Copies in host memory, pinned if they come from another device, for faster transfer back."""
        return self.map(_to_host)

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


def _to_host(tensor: Tensor) -> Tensor:
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned, device="cpu").copy_(tensor)


class PaddedLayer(CacheLayerMixin):
    """One layer's KVs: [rows, heads, columns, dim]."""

    keys: Tensor
    values: Tensor
    is_sliding = False  # sliding windows are applied by the mask, which transformers builds from columns

    def __init__(self, kv_shape: LayerShape, window: Window, device: torch.device) -> None:
        super().__init__()
        self.kv_shape = kv_shape
        self.device, self.dtype = device, kv_shape.dtype
        self.is_initialized = True
        self.pending = 0  # columns that the current forward pass has written after the window
        self._window = window
        self.resize(Shape(0, 0), 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("tensors are allocated by the cache")

    def resize(self, shape: Shape, start: int) -> None:
        """Reallocate the tensors and move the window to column `start`; everything else is zero."""
        window, kv_shape = self._window, self.kv_shape
        live = slice(window.start, window.end)
        placed = slice(start, start + window.columns)
        for name, dim in (("keys", kv_shape.key_dim), ("values", kv_shape.value_dim)):
            old: Tensor | None = getattr(self, name)
            new = torch.zeros(
                (shape.rows, kv_shape.num_heads, shape.columns, dim), dtype=kv_shape.dtype, device=self.device
            )
            if old is not None and window.rows:
                new[: window.rows, :, placed] = old[: window.rows, :, live]
            setattr(self, name, new)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def blank(self, row: int, end: int) -> None:
        """Zero a row before column `end`.

        KVs of a former query there are masked, but masked values are still multiplied, and 0 x NaN is NaN.
        """
        for tensor in self.tensors:
            tensor[row, :, :end] = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new columns after the window. Returns views of all columns up to them, [rows, heads, columns, dim]."""
        window = self._window
        first = window.end + self.pending
        last = first + key_states.shape[2]
        assert last <= self.keys.shape[2], "room is reserved before a forward pass"
        self.keys[: window.rows, :, first:last] = key_states
        self.values[: window.rows, :, first:last] = value_states
        self.pending += key_states.shape[2]
        rows, columns = slice(window.rows), slice(window.start, last)
        return self.keys[rows, :, columns], self.values[rows, :, columns]

    def get_seq_length(self) -> int:
        return self._window.columns + self.pending

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class PaddedCache(Cache):
    """The cache that is passed to the model.

    Attributes:
        lengths: KVs of each row, at its end; 0 for an idle row.
        gaps: columns of padding that each row keeps before its KVs.
    """

    layers: list[PaddedLayer]

    def __init__(self, kv_shape: KVShape, device: torch.device) -> None:
        self._window = Window()
        super().__init__(layers=[PaddedLayer(layer, self._window, device) for layer in kv_shape.layers])
        self.kv_shape = kv_shape
        self.lengths: list[int] = []
        self.gaps: list[int] = []
        self.shape = Shape(0, 0)

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self._window.rows

    @property
    def columns(self) -> int:
        """Columns in use, at least `longest`."""
        return self._window.columns

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def least_columns(self) -> int:
        """Columns that cannot be cut: maximum over rows of length plus gap."""
        return max((sum(each) for each in zip(self.lengths, self.gaps, strict=True)), default=0)

    @property
    def nbytes(self) -> int:
        return self.shape.rows * self.shape.columns * self.kv_shape.nbytes

    def has_room(self, rows: int, left: int, right: int) -> bool:
        """Whether the tensors have `rows` rows, and `left` and `right` free columns beside the window."""
        window = self._window
        return rows <= self.shape.rows and left <= window.start and window.end + right <= self.shape.columns

    def resize(self, shape: Shape, left: int = 0) -> int:
        """Reallocate the tensors layer by layer, with `left` free columns before the window.

        Returns the maximum number of bytes held meanwhile.
        """
        window = self._window
        assert shape.rows >= window.rows and shape.columns >= left + window.columns
        new_bytes = shape.rows * shape.columns
        held = peak = self.nbytes
        for layer in self.layers:
            more = new_bytes * layer.kv_shape.nbytes
            peak = max(peak, held + more)
            layer.resize(shape, left)
            held += more - self.shape.rows * self.shape.columns * layer.kv_shape.nbytes
        window.start, window.end = left, left + window.columns
        self.shape = shape
        return peak

    # -- rows ------------------------------------------------------------------------------------------------------

    def add_rows(self, count: int) -> range:
        """Append `count` empty rows, for which there must be room. Returns their numbers."""
        first = self._window.rows
        assert first + count <= self.shape.rows
        self._window.rows += count
        self.lengths += [0] * count
        self.gaps += [0] * count
        for row in range(first, first + count):
            self.clear(row)
        return range(first, first + count)

    def write(self, row: int, kvs: QueryKVs) -> None:
        """Embed a query's KVs at the end of a row (4.2). The window grows to the left if they are longer."""
        self._place(row, kvs, self._window.end)

    def view(self, row: int) -> QueryKVs:
        """Views of a row's KVs, valid until the cache changes."""
        return self._view(row, self._window.end)

    def clear(self, row: int) -> None:
        """Zero a row's KVs and keep the row."""
        self.lengths[row] = self.gaps[row] = 0
        for layer in self.layers:
            layer.blank(row, self._window.end)

    def drop(self, row: int) -> int:
        """Drop a row by moving the last one into its place. Returns the number of that last row."""
        last = self._window.rows - 1
        if row != last:
            length = self.lengths[last]
            columns = slice(self._window.end - length, self._window.end)
            for layer in self.layers:
                layer.blank(row, columns.start)
                for tensor in layer.tensors:
                    tensor[row, :, columns] = tensor[last, :, columns]
            self.lengths[row], self.gaps[row] = length, self.gaps[last]
        self.lengths.pop()
        self.gaps.pop()
        self._window.rows = last
        return last

    # -- columns ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a forward pass; discards columns of an interrupted one."""
        for layer in self.layers:
            layer.pending = 0

    def advance(self, counts: Sequence[int]) -> None:
        """Extend the window by the columns of a forward pass, the last `counts[row]` of which are the row's tokens."""
        self._window.end += self._end_pass()
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def advance_shaped(self, counts: Sequence[int], joined: Sequence[int], *, keep_gaps: bool) -> None:
        """Do as `advance` does, for a pass in which queries joined while the others took one token (4.1).

        Rows in `joined` have their tokens at the end of the columns written, the others in the first of them. The
        joined rows are moved back so that all rows end there. The padding of the others is dropped, or with
        `keep_gaps` kept before their tokens.
        """
        end, width = self._window.end, self._end_pass()
        moved = []
        for row in joined:
            self.lengths[row] = counts[row]
            moved.append(self._view(row, end + width).map(Tensor.clone))
        self._window.end = end + 1
        for row, kvs in zip(joined, moved, strict=True):
            self._place(row, kvs, end + 1)
        for row in set(range(self.rows)) - set(joined):
            self.lengths[row] += counts[row]
            if keep_gaps:
                self.gaps[row] += width - 1
        self._window.start = min(self._window.start, self._window.end - self.least_columns)
        assert self._window.start >= 0, "room on the left is reserved before"

    def release_front(self) -> None:
        """Cut the leading columns that are padding in every row (4.1, "resources releasing"). Copies nothing."""
        self._window.start = max(self._window.start, self._window.end - self.least_columns)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _end_pass(self) -> int:
        """The columns that the forward pass has written."""
        width = self.layers[0].pending
        assert all(layer.pending == width for layer in self.layers), "a layer was left out"
        self.begin()
        return width

    def _view(self, row: int, end: int) -> QueryKVs:
        columns = slice(end - self.lengths[row], end)
        return QueryKVs(
            tuple((layer.keys[row, :, columns], layer.values[row, :, columns]) for layer in self.layers)
        )

    def _place(self, row: int, kvs: QueryKVs, end: int) -> None:
        start = end - kvs.length
        assert start >= 0, "room on the left is reserved before"
        for layer, tensors in zip(self.layers, kvs.layers, strict=True):
            layer.blank(row, start)
            for tensor, new in zip(layer.tensors, tensors, strict=True):
                tensor[row, :, start:end].copy_(new, non_blocking=True)
        self.lengths[row], self.gaps[row] = kvs.length, 0
        self._window.start = min(self._window.start, start)
