"""Assignment of sampler slots to sequences."""

from collections.abc import Sequence as SequenceType

from torch import Tensor

from winnow.engine.requests.request import Sequence
from winnow.sampling import Sampler, SamplingParams
from winnow.sampling.rows import Fault
from winnow.sampling.sampler_output import SamplerOutput


class SamplerSlots:
    """Samples for sequences, independently of their rows.

    The sampler's state of a sequence follows from its tokens, so a slot may be released and taken again at any time.
    """

    def __init__(self, sampler: Sampler, count: int) -> None:
        self._sampler = sampler
        self._count = count
        self._slots: dict[Sequence, int] = {}
        self._free = list(range(count))

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        return self._sampler.with_seed(params)

    def sample(self, sequences: SequenceType[Sequence], logits: Tensor) -> SamplerOutput:
        """Sample the next token of each sequence, from logits [n, V]; n may exceed the number of slots."""
        token_ids, logprobs = [], []
        faults: dict[int, Fault] = {}
        for first in range(0, len(sequences), self._count):
            some = sequences[first : first + self._count]
            sampled = self._sampler.sample(logits[first : first + self._count], self._slots_of(some))
            token_ids += sampled.token_ids
            logprobs += sampled.logprobs
            faults |= {first + row: fault for row, fault in sampled.faults.items()}
        return SamplerOutput(token_ids, logprobs, faults)

    def leave(self, sequence: Sequence) -> None:
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            self._sampler.remove(slot)
            self._free.append(slot)

    def clear(self) -> None:
        for sequence in list(self._slots):
            self.leave(sequence)

    def _slots_of(self, sequences: SequenceType[Sequence]) -> list[int]:
        missing = [sequence for sequence in sequences if sequence not in self._slots]
        if len(missing) > len(self._free):
            wanted = set(sequences)
            for other in [each for each in self._slots if each not in wanted]:
                self.leave(other)
        for sequence in missing:
            slot = self._free.pop()
            self._sampler.add(
                slot,
                sequence.request.params,
                sequence.request.prompt_token_ids,
                sequence.output_token_ids,
                sequence.index,
            )
            self._slots[sequence] = slot
        return [self._slots[sequence] for sequence in sequences]
