"""Counts of the tokens that a sequence has seen, for the penalties on repetition."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from winnow.sampling.list_params import require

_FIRST_CAPACITY = 4


class TokenCounts:
    """One row of counts per penalised sequence, on the device.

    A row costs 5 bytes per vocabulary entry (0.7 MB at 152k), so rows are handed out only to requests with a penalty,
    the tables double when they run out, and all memory is given back when the last such request leaves.

    Attributes:
        output_counts: [capacity, V] int32, how often the answer holds each token.
        in_prompt: [capacity, V] bool, whether the prompt holds it.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._release_all()

    def _release_all(self) -> None:
        self.output_counts = torch.zeros((0, self.vocab_size), dtype=torch.int32, device=self.device)
        self.in_prompt = torch.zeros((0, self.vocab_size), dtype=torch.bool, device=self.device)
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        return self.output_counts.nbytes + self.in_prompt.nbytes

    def acquire(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> int:
        """Return a row that has seen these tokens. Raises InvalidRequestError: a token id is outside the vocabulary."""
        prompt, output = self._ids("prompt", prompt_token_ids), self._ids("output", output_token_ids)
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.in_prompt[row] = False
        self.in_prompt[row, prompt] = True
        self.output_counts[row] = torch.bincount(output, minlength=self.vocab_size)
        return row

    def release(self, row: int) -> None:
        """Hand a row back; the last one takes the tables with it."""
        self._free.append(row)
        if len(self._free) == len(self.output_counts):
            self._release_all()

    def record(self, rows: Tensor, tokens: Tensor) -> None:
        """Count one more token in each row; `rows` and `tokens` are [R] int64, rows distinct."""
        one = torch.ones_like(rows, dtype=torch.int32)
        self.output_counts.index_put_((rows, tokens), one, accumulate=True)

    def penalise(
        self, logits: Tensor, rows: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
    ) -> None:
        """Lower, in place, the logits of tokens already seen, [R, V] float32, in `rows` of this table, [R] int64.

        Repetition (CTRL, Keskar et al. 2019) looks at prompt and answer, and divides positive logits but multiplies
        negative ones, so that it lowers both. Frequency and presence (OpenAI) look at the answer alone. All three are
        [R, 1] float32.
        """
        counts = self.output_counts[rows]
        used = counts > 0
        lowered = torch.where(logits > 0, logits / repetition, logits * repetition)
        torch.where(self.in_prompt[rows].logical_or_(used), lowered, logits, out=logits)
        logits.sub_(frequency * counts).sub_(presence * used)

    def _ids(self, name: str, ids: Sequence[int]) -> Tensor:
        array = np.asarray(ids, dtype=np.int64)
        for extreme in (array.min(), array.max()) if array.size else ():
            what = f"between 0 and {self.vocab_size - 1}"
            require(0 <= extreme < self.vocab_size, f"{name} token ids", what, int(extreme))
        return torch.from_numpy(array).to(self.device)

    def _grow(self) -> None:
        held = len(self.output_counts)
        added = held or _FIRST_CAPACITY
        self.output_counts, self.in_prompt = (
            torch.cat([table, table.new_zeros(added, self.vocab_size)])
            for table in (self.output_counts, self.in_prompt)
        )
        self._free.extend(reversed(range(held, held + added)))
