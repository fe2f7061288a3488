"""Prefilling a group of queries apart from the running batch."""

from collections.abc import Sequence as SequenceType
from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.engine.request import Sequence
from winnow.outputs import LogprobDict
from winnow.padded.cache import Extent, PaddedCache
from winnow.padded.model import PaddedModel, span_mask
from winnow.padded.shape import KVShape
from winnow.padded.tally import Tally
from winnow.sampling import prompt_logprobs


@dataclass(frozen=True)
class Prefilled:
    """A group whose tokens are computed; row i of the cache holds the KVs of sequence i."""

    sequences: tuple[Sequence, ...]
    cache: PaddedCache
    logits: Tensor
    """Of each sequence's last token, [n, V]."""
    prompt_logprobs: dict[Sequence, list[LogprobDict]]
    """Of those that ask for them: one for each token of the prompt but the first."""


def prefill(
    model: PaddedModel,
    tally: Tally,
    sequences: SequenceType[Sequence],
    shape: KVShape,
    extent: Extent,
    chunk: int | None,
) -> Prefilled:
    """Compute all tokens of `sequences` together, padded on the left to the longest.

    Args:
        extent: of the tensors to make, which must hold them.
        chunk: most columns of one forward pass; None: all at once.
    """
    device = model.device
    width = max(sequence.num_tokens for sequence in sequences)
    cache = PaddedCache(shape, device)
    cache.resize(extent)
    cache.add_rows(len(sequences))
    padding = [width - sequence.num_tokens for sequence in sequences]
    tokens = torch.tensor(
        [[0] * pad + sequence.token_ids for pad, sequence in zip(padding, sequences, strict=True)],
        device=device,
    )
    positions = (
        torch.arange(width, device=device) - torch.tensor(padding, device=device)[:, None]
    ).clamp_min(0)
    mask = span_mask([(pad, width) for pad in padding], width, device)
    asked = [i for i, sequence in enumerate(sequences) if sequence.request.wants_prompt_logprobs]
    found: dict[Sequence, list[LogprobDict]] = {sequences[i]: [] for i in asked}
    logits = torch.empty(0)
    for first in range(0, width, chunk or width):
        last = min(first + (chunk or width), width)
        logits = model.forward(
            cache,
            tokens[:, first:last],
            positions[:, first:last],
            mask[:, :last],
            None if asked else [last - first - 1],
        )
        counts = [min(max(last - pad, 0), last - first) for pad in padding]
        tally.count(len(sequences), last - first, sum(counts))
        cache.advance(counts)
        for i in asked:
            found[sequences[i]] += _prompt_logprobs(sequences[i], logits[i], first - padding[i])
    for sequence in sequences:
        sequence.num_computed = sequence.num_tokens
    tally.prefills += 1
    return Prefilled(tuple(sequences), cache, logits[:, -1], found)


def _prompt_logprobs(sequence: Sequence, logits: Tensor, first: int) -> list[LogprobDict]:
    """Logprobs of the prompt tokens that follow positions `first` and on, whose logits are [n, V]."""
    top = sequence.request.params.prompt_logprobs
    assert top is not None, "prompt logprobs are collected only where asked for"
    prompt = sequence.request.prompt_token_ids
    start, end = max(first, 0), min(first + len(logits), len(prompt) - 1)
    if start >= end:
        return []
    return prompt_logprobs(logits[start - first : end - first], prompt[start + 1 : end + 1], top)
