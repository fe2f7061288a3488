"""The memory of the batch: bytes of rows and columns, sizes of tensors, thresholds of parking and admission."""

from dataclasses import dataclass

from winnow_lab.padded.cache import KVShape, Shape

# Columns kept free after the batch, so that tensors are reallocated once in as many steps: a fraction of those in use,
# within bounds.
_SLACK_PART = 8
_LEAST_SLACK, _MOST_SLACK = 32, 256


@dataclass(frozen=True)
class MemoryBudget:
    """The KV memory, in rows and columns of a model's cache.

    Attributes:
        kv_memory: bytes.
        park_above: fraction of the memory above which queries are parked.
        admit_below: fraction of the memory up to which queries are admitted beside others.
    """

    kv_shape: KVShape
    kv_memory: int
    max_rows: int
    park_above: float
    admit_below: float

    @property
    def limit(self) -> int:
        return int(self.kv_memory * self.park_above)

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of one row; one layer counts twice, as during reallocation."""
        return self.kv_shape.nbytes + self.kv_shape.largest_layer

    @property
    def max_columns(self) -> int:
        """Length of the longest query that fits alone."""
        return self.limit // self.column_bytes

    def nbytes(self, rows: int, columns: int) -> int:
        return rows * columns * self.column_bytes

    def fits(self, rows: int, columns: int, reserved_bytes: int = 0) -> bool:
        return self.nbytes(rows, columns) + reserved_bytes <= self.limit

    def admits(self, rows: int, columns: int, reserved_bytes: int = 0) -> bool:
        """Whether a batch may grow to this size, with slack for some steps without parking a query."""
        needed = self.nbytes(rows, columns + _slack(columns)) + reserved_bytes
        return needed <= int(self.kv_memory * self.admit_below)

    def tensor_shape(self, rows: int, columns: int, reserved_bytes: int = 0) -> Shape | None:
        """The shape to allocate for a batch, with slack if there is memory for it; None: it does not fit."""
        if not self.fits(rows, columns, reserved_bytes):
            return None
        roomy = columns + _slack(columns)
        more_rows = min(1 << (rows - 1).bit_length(), max(self.max_rows, rows))
        if self.fits(more_rows, roomy, reserved_bytes):
            return Shape(more_rows, roomy)
        most = (self.limit - reserved_bytes) // (rows * self.column_bytes)
        return Shape(rows, min(roomy, most))


def _slack(columns: int) -> int:
    return min(max(columns // _SLACK_PART, _LEAST_SLACK), _MOST_SLACK)
