"""How much memory the batch may take: bytes of rows and columns, the size of tensors, and the two thresholds."""

from dataclasses import dataclass

from winnow.padded.cache import Shape
from winnow.padded.shape import KVShape

# Columns kept free behind the batch, so that tensors are exchanged once in so many steps: a part of those in use,
# between a least and a most.
_SLACK_PART = 8
_LEAST_SLACK, _MOST_SLACK = 32, 256


@dataclass(frozen=True)
class MemoryBudget:
    """The KV memory, in rows and columns of a model's cache."""

    kv_shape: KVShape
    kv_memory: int
    max_rows: int
    park_above: float
    """Part of the memory above which queries are parked."""
    admit_below: float
    """Part of the memory up to which queries are admitted beside others."""

    @property
    def limit(self) -> int:
        """Bytes that may be held."""
        return int(self.kv_memory * self.park_above)

    @property
    def column_bytes(self) -> int:
        """One column of one row. While tensors are exchanged for others, one layer's exist twice."""
        return self.kv_shape.nbytes + self.kv_shape.largest_layer

    @property
    def max_columns(self) -> int:
        """The longest query that fits alone."""
        return self.limit // self.column_bytes

    def nbytes(self, rows: int, columns: int) -> int:
        """Most bytes held by tensors of so many rows and columns."""
        return rows * columns * self.column_bytes

    def fits(self, rows: int, columns: int, reserved_bytes: int = 0) -> bool:
        """Whether a batch can have this size beside `reserved_bytes` bytes."""
        return self.nbytes(rows, columns) + reserved_bytes <= self.limit

    def admits(self, rows: int, columns: int, reserved_bytes: int = 0) -> bool:
        """Whether a batch may grow to this size: with room to go on for a while without parking anybody."""
        needed = self.nbytes(rows, columns + _slack(columns)) + reserved_bytes
        return needed <= int(self.kv_memory * self.admit_below)

    def tensor_shape(self, rows: int, columns: int, reserved_bytes: int = 0) -> Shape | None:
        """The size of tensors to make for a batch, with room to grow where there is any; None: it does not fit."""
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
