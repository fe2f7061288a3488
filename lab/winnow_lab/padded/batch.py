"""The running batch: which sequence has which row, and the inputs of its forward passes."""

from collections.abc import Sequence as SequenceType

import torch
from torch import Tensor

from winnow.engine.requests.request import Sequence
from winnow_lab.padded.cache import PaddedCache, QueryKVs
from winnow_lab.padded.memory_budget import MemoryBudget
from winnow_lab.padded.model import PaddedModel, span_mask
from winnow_lab.padded.stats import Counters


class Batch:
    """Sequences that decode together.

    Attributes:
        rows: the sequence of each row; None: the query is finished, and the row is idle.
        keeps_gaps: whether rows keep the padding that they get while others join (`ShapingWithGaps`).
        reserved_bytes: bytes on the device of a group that is prefilled apart and not yet embedded.
        peak_bytes: maximum bytes of tensors so far, `reserved_bytes` included.
    """

    def __init__(
        self, model: PaddedModel, budget: MemoryBudget, counters: Counters, *, keeps_gaps: bool = False
    ) -> None:
        self._model = model
        self._budget = budget
        self._counters = counters
        self.keeps_gaps = keeps_gaps
        self.cache = PaddedCache(budget.kv_shape, model.device)
        self.rows: list[Sequence | None] = []
        self.reserved_bytes = 0
        self.peak_bytes = 0

    # -- members ---------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.rows if sequence is not None]

    @property
    def columns(self) -> int:
        return self.cache.columns

    def reset(self) -> None:
        """Remove all sequences and free the memory."""
        for sequence in self.running:
            sequence.kv.slot = None
        self.cache = PaddedCache(self._budget.kv_shape, self._model.device)
        self.rows = []

    def adopt(self, cache: PaddedCache, rows: SequenceType[Sequence | None]) -> None:
        """Make a prefilled group the batch, which must be empty. Copies nothing."""
        assert not self.running
        self.cache, self.reserved_bytes = cache, 0
        self.rows = [None] * len(rows)
        for row, sequence in enumerate(rows):
            if sequence is None:
                cache.clear(row)
            else:
                self._enter(sequence, row)

    def join(self, sequence: Sequence, kvs: QueryKVs) -> None:
        """Embed a query's KVs (4.2); there must be room for them."""
        grown = max(kvs.length - self.columns, 0)
        row = self._take_row(left=grown)
        self.cache.write(row, kvs)
        self._enter(sequence, row)

    def leave(self, sequence: Sequence, *, keep_row: bool) -> None:
        """Remove a sequence. Its row is dropped, or with `keep_row` kept idle while others run."""
        row = sequence.kv.running_slot
        sequence.kv.slot = None
        self.rows[row] = None
        if keep_row:
            self.cache.clear(row)
        else:
            self._drop(row)
        if not self.running:
            self.reset()

    def view(self, sequence: Sequence) -> QueryKVs:
        return self.cache.view(sequence.kv.running_slot)

    def drop_idle_rows(self) -> None:
        for row in reversed(range(len(self.rows))):
            if self.rows[row] is None:
                self._drop(row)

    # -- memory ----------------------------------------------------------------------------------------------------

    def reserve(self, rows: int, left: int, right: int) -> bool:
        """Ensure that tensors have `rows` rows, and `left` and `right` free columns. False: too little memory."""
        cache = self.cache
        allowed = self._budget.fits(cache.shape.rows, cache.shape.columns, self.reserved_bytes)
        if allowed and cache.has_room(rows, left, right):
            return True
        shape = self._budget.tensor_shape(rows, left + cache.columns + right, self.reserved_bytes)
        if shape is None:
            return False
        self.note_peak(cache.resize(shape, left))
        return True

    def reserve_bytes(self, nbytes: int) -> None:
        """Reserve memory for a group that is prefilled apart, shrinking the batch's tensors if necessary.

        The group must have been found to fit. Set `reserved_bytes` to 0 to release the memory.
        """
        cache = self.cache
        self.release_front()
        if not self._budget.fits(cache.shape.rows, cache.shape.columns, nbytes):
            shape = self._budget.tensor_shape(len(self.rows), self.columns, nbytes)
            assert shape is not None, "what is prefilled beside the batch has been found to fit"
            self.note_peak(cache.resize(shape))
        self.reserved_bytes = nbytes
        self.note_peak(cache.nbytes)

    def release_front(self) -> None:
        """Cut the leading columns that are padding in every row."""
        before = self.columns
        self.cache.release_front()
        self._counters.released += before - self.columns

    def note_peak(self, nbytes: int) -> None:
        """Count bytes that are held beside `reserved_bytes`."""
        self.peak_bytes = max(self.peak_bytes, nbytes + self.reserved_bytes)

    # -- forward passes --------------------------------------------------------------------------------------------

    def decode(self) -> tuple[list[Sequence], Tensor]:
        """Compute the last token of every sequence. Returns the sequences and their logits [n, V]."""
        cache, live = self.cache, self.running
        counts = [int(sequence is not None) for sequence in self.rows]
        self._count(1, len(live))
        # An idle row attends to its own new column alone, so that no attention is empty.
        last = cache.columns + 1
        spans = [(last - length - 1, last) for length in cache.lengths]
        tokens = [[sequence.token_ids[-1] if sequence else 0] for sequence in self.rows]
        positions = [[sequence.kv.num_computed if sequence else 0] for sequence in self.rows]
        logits = self._forward(tokens, positions, spans, [0])[:, 0]
        cache.advance(counts)
        for sequence in live:
            sequence.kv.num_computed += 1
        return live, logits if len(live) == len(self.rows) else logits[[s.kv.running_slot for s in live]]

    def decode_with(self, joiners: SequenceType[Sequence]) -> tuple[list[Sequence], Tensor]:
        """Prefill `joiners` in the pass in which the others decode, padded after their one token (4.1).

        Returns the sequences and their logits [n, V].
        """
        cache = self.cache
        width = max(joiner.num_tokens for joiner in joiners)
        for joiner in joiners:
            self._enter(joiner, self._take_row(left=0))
        tokens, positions, spans, counts = [], [], [], []
        for row, sequence in enumerate(self.rows):
            assert sequence is not None, "idle rows are dropped before a query joins"
            ids = sequence.token_ids[sequence.kv.num_computed :]
            front = width - len(ids) if sequence in joiners else 0
            behind = width - len(ids) - front
            tokens.append([ids[0]] * front + ids + [ids[0]] * behind)
            own = list(range(sequence.kv.num_computed, sequence.num_tokens))
            positions.append([0] * front + own + [0] * behind)
            first = cache.columns + front - cache.lengths[row]
            spans.append((first, cache.columns + front + len(ids)))
            counts.append(len(ids))
        self._count(width, sum(counts))
        logits = self._forward(tokens, positions, spans, sorted({0, width - 1}))
        joined = [joiner.kv.running_slot for joiner in joiners]
        cache.advance_shaped(counts, joined, keep_gaps=self.keeps_gaps)
        live = self.running
        for sequence, count in zip(live, counts, strict=True):
            sequence.kv.num_computed += count
        kept = [-1 if sequence in joiners else 0 for sequence in live]
        return live, logits[torch.arange(len(live), device=logits.device), kept]

    def check_integrity(self) -> None:
        """Assert that rows, lengths and tensors agree."""
        cache = self.cache
        assert len(self.rows) == cache.rows == len(cache.lengths), "rows are lost"
        for row, sequence in enumerate(self.rows):
            if sequence is None:
                assert cache.lengths[row] == 0, "an idle row holds KVs"
            else:
                assert sequence.kv.slot == row, "a sequence does not know its row"
                assert cache.lengths[row] == sequence.kv.num_computed == sequence.num_tokens - 1
        assert cache.longest <= cache.least_columns <= cache.columns <= cache.shape.columns
        assert cache.rows <= cache.shape.rows
        for layer in cache.layers:
            for tensor in layer.tensors:
                assert tensor.shape[:3:2] == (cache.shape.rows, cache.shape.columns)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _take_row(self, left: int) -> int:
        """An empty row: an idle one, or a new one."""
        free = [row for row, sequence in enumerate(self.rows) if sequence is None]
        rows = len(self.rows) + (not free)
        reserved = self.reserve(rows, left, 0)
        assert reserved, "a query that joins has been found to fit"
        if free:
            return free[0]
        self.rows.append(None)
        return self.cache.add_rows(1)[0]

    def _enter(self, sequence: Sequence, row: int) -> None:
        self.rows[row] = sequence
        sequence.kv.slot = row
        self._counters.joins += 1

    def _drop(self, row: int) -> None:
        moved = self.cache.drop(row)
        last = self.rows.pop()
        assert moved == len(self.rows)
        if moved != row:
            self.rows[row] = last
            if last is not None:
                last.kv.slot = row

    def _count(self, width: int, tokens: int) -> None:
        counters = self._counters
        counters.count(len(self.rows), width, tokens)
        counters.passes += 1
        counters.columns_held += self.columns
        counters.columns_needed += self.cache.longest

    def _forward(
        self,
        tokens: list[list[int]],
        positions: list[list[int]],
        spans: list[tuple[int, int]],
        keep: list[int],
    ) -> Tensor:
        device = self._model.device
        mask = span_mask(spans, self.columns + len(tokens[0]), device)
        inputs = torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
        return self._model.forward(self.cache, *inputs, mask, keep)
