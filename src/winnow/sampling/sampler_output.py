"""Tokens of a step as they leave the sampler, and how they are put together: from tables, and from drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from winnow.sampling.logprobs import read_logprobs
from winnow.sampling.rows import Fault
from winnow.sampling.slots import Feature, SamplingBatch
from winnow.values.logprob import Logprob


@dataclass(frozen=True)
class SamplerOutput:
    """One step's tokens, in the order of the slots asked for."""

    token_ids: list[int]  # [B], or those of each slot one behind the other; 0 where there is a fault
    logprobs: list[dict[int, Logprob] | None]  # of the sampled token and others; None: not asked for
    faults: dict[int, Fault] = field(default_factory=dict)  # by slot, as they were asked for
    offsets: list[int] | None = None  # where each slot's tokens begin, and the last end; None: one each


def accepted(output: SamplerOutput, drafts: Sequence[Sequence[int]]) -> SamplerOutput:
    """Return of each slot's tokens those up to the first that is not what was proposed, or has a fault behind it."""
    token_ids: list[int] = []
    logprobs: list[dict[int, Logprob] | None] = []
    faults: dict[int, Fault] = {}
    offsets, first = [0], 0
    for index, draft in enumerate(drafts):
        count = 1
        if first in output.faults:
            faults[index] = output.faults[first]
        else:
            for at, proposed in enumerate(draft, first):
                if output.token_ids[at] != proposed or at + 1 in output.faults:
                    break
                count += 1
        token_ids += output.token_ids[first : first + count]
        logprobs += output.logprobs[first : first + count]
        offsets.append(len(token_ids))
        first += 1 + len(draft)
    return SamplerOutput(token_ids, logprobs, faults, offsets)


def merged(rest: SamplerOutput, others: Sequence[int], walked: Mapping[int, SamplerOutput]) -> SamplerOutput:
    assert rest.offsets is not None, "drafts make it ragged"
    bounds = dict(zip(others, zip(rest.offsets, rest.offsets[1:], strict=False), strict=True))
    faults = {others[index]: fault for index, fault in rest.faults.items()}
    output = SamplerOutput([], [], faults, [0])
    assert output.offsets is not None
    for index in range(len(others) + len(walked)):
        own, (first, end) = walked.get(index), bounds.get(index, (0, 0))
        output.token_ids.extend(rest.token_ids[first:end] if own is None else own.token_ids)
        output.logprobs.extend(rest.logprobs[first:end] if own is None else own.logprobs)
        output.offsets.append(len(output.token_ids))
        if own is not None and own.faults:
            faults[index] = own.faults[0]
    return output


def read_tables(numbers: NDArray[np.float64], batch: SamplingBatch) -> SamplerOutput:
    """Return what came from the device, block after block, back in the order of the batch."""
    token_ids = np.zeros(len(batch.order), dtype=np.int64)
    logprobs: list[dict[int, Logprob] | None] = [None] * len(batch.order)
    start = 0
    for block in batch.blocks:
        asked = Feature.LOGPROBS in block.features
        width = 3 + 2 * block.top if asked else 1
        rows = batch.order[block.first : block.end]
        table = numbers[start : start + width * len(rows)].reshape(len(rows), width)
        start += table.size
        token_ids[rows] = table[:, 0]
        if asked:
            for row, report in zip(rows.tolist(), table.tolist(), strict=True):
                logprobs[row] = read_logprobs(report, int(batch.top[row]))
    return separate_faults(token_ids.tolist(), logprobs)


def separate_faults(marked: list[int], logprobs: list[dict[int, Logprob] | None]) -> SamplerOutput:
    """Return the output of tokens among which faults may stand."""
    if min(marked) >= 0:
        return SamplerOutput(marked, logprobs)
    faults = {row: Fault(token) for row, token in enumerate(marked) if token < 0}
    return SamplerOutput(
        [max(token, 0) for token in marked],
        [None if row in faults else each for row, each in enumerate(logprobs)],
        faults,
    )
