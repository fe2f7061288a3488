"""Prefill of a group of queries apart from the running batch: padded on the left, so that all end in one column; and a
check at load that padding does not change what a model computes."""

from collections.abc import Callable, Sequence as SequenceType
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from winnow.engine.requests.request import Sequence
from winnow.errors import UnsupportedModelError
from winnow.models.model.damage import first_line
from winnow.sampling import prompt_logprobs
from winnow.sampling.rows import Fault, sound_rows
from winnow.values.logprob import LogprobDict
from winnow_lab.padded.cache import KVShape, PaddedCache, Shape
from winnow_lab.padded.model import PaddedModel, span_mask
from winnow_lab.padded.stats import Counters


@dataclass(frozen=True)
class PaddedInputs:
    """A model's inputs for a group that starts with an empty cache; all int64 [rows, width]."""

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    padding: list[int]
    """Columns before each query."""

    @classmethod
    def of(cls, queries: SequenceType[SequenceType[int]], device: torch.device) -> Self:
        width = max(map(len, queries))
        padding = [width - len(query) for query in queries]
        # Masked values are still multiplied: pad a query with its own first token, so that it cannot be affected by
        # faults of another token (NaN in its embedding).
        tokens = [[query[0]] * pad + list(query) for pad, query in zip(padding, queries, strict=True)]
        own = torch.arange(width, device=device) - torch.tensor(padding, device=device)[:, None]
        mask = span_mask([(pad, width) for pad in padding], width, device)
        return cls(torch.tensor(tokens, device=device), own.clamp_min(0), mask, padding)

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def counts(self, first: int, last: int) -> list[int]:
        """The number of tokens of each query within a range of columns."""
        return [min(max(last - pad, 0), last - first) for pad in self.padding]

    def forward(
        self, model: PaddedModel, cache: PaddedCache, first: int, last: int, keep: list[int] | None
    ) -> Tensor:
        """Compute a range of columns into the cache, which holds those before. Returns as `PaddedModel.forward`."""
        columns = slice(first, last)
        logits = model.forward(
            cache, self.tokens[:, columns], self.positions[:, columns], self.mask[:, :last], keep
        )
        cache.advance(self.counts(first, last))
        return logits


@dataclass(frozen=True)
class Prefilled:
    """A group whose tokens are computed.

    Attributes:
        cache: row i holds the KVs of sequence i.
        logits: of each sequence's last token, [n, V].
        prompt_logprobs: of the sequences that ask for them: one entry per prompt token but the first.
    """

    sequences: tuple[Sequence, ...]
    cache: PaddedCache
    logits: Tensor
    prompt_logprobs: dict[Sequence, list[LogprobDict]]
    counters: Counters

    @property
    def tensors(self) -> list[Tensor]:
        return [self.logits, *(tensor for layer in self.cache.layers for tensor in layer.tensors)]


class PrefillStoppedError(Exception):
    """A prefill was stopped."""


def prefill(
    model: PaddedModel,
    sequences: SequenceType[Sequence],
    kv_shape: KVShape,
    shape: Shape,
    chunk: int | None,
    stopped: Callable[[], bool] = lambda: False,
) -> Prefilled:
    """Compute all tokens of `sequences` together, padded on the left to the longest.

    Reads the sequences without changing them, so that it may run in parallel to a pass of the batch.

    Args:
        shape: of the tensors to allocate; at least [n, longest sequence].
        chunk: maximum columns of one forward pass; None: all at once.
        stopped: called before each forward pass; True stops the prefill.
    """
    counters = Counters(prefills=1)
    inputs = PaddedInputs.of([sequence.token_ids for sequence in sequences], model.device)
    cache = PaddedCache(kv_shape, model.device)
    cache.resize(shape)
    cache.add_rows(len(sequences))
    asked = [row for row, sequence in enumerate(sequences) if sequence.request.wants_prompt_logprobs]
    found: dict[Sequence, list[LogprobDict]] = {sequences[row]: [] for row in asked}
    logits = torch.empty(0, device="cpu")
    for first in range(0, inputs.width, chunk or inputs.width):
        if stopped():
            raise PrefillStoppedError
        last = min(first + (chunk or inputs.width), inputs.width)
        logits = inputs.forward(model, cache, first, last, None if asked else [last - first - 1])
        counters.count(len(sequences), last - first, sum(inputs.counts(first, last)))
        for row in asked:
            found[sequences[row]] += _prompt_logprobs(
                sequences[row], logits[row], first - inputs.padding[row]
            )
    return Prefilled(tuple(sequences), cache, logits[:, -1], found, counters)


def _prompt_logprobs(sequence: Sequence, logits: Tensor, first: int) -> list[LogprobDict]:
    """Logprobs of the prompt tokens that follow positions `first` and on, whose logits are [n, V]."""
    top = sequence.request.params.prompt_logprobs
    assert top is not None, "prompt logprobs are collected only if asked for"
    prompt = sequence.request.prompt_token_ids
    start, end = max(first, 0), min(first + len(logits), len(prompt) - 1)
    if start >= end:
        return []
    return prompt_logprobs(logits[start - first : end - first], prompt[start + 1 : end + 1], top)


_LENGTHS = (7, 4, 1)
# Maximum difference relative to the norm of the logits. In half precision results differ by rounding, which may also
# route a token to another expert; a model that attends to padding differs by more.
_FULL, _HALF = 1e-3, 0.2


@torch.inference_mode()
def check_padding(model: PaddedModel, kv_shape: KVShape, vocab_size: int) -> None:
    """Compute three short queries in one padded batch and each alone, and compare the logits.

    A query whose logits are not finite when computed alone is skipped: one of its tokens may be at fault.

    Raises:
        UnsupportedModelError: the logits differ, or none are finite.
    """
    queries = [
        [(3 * row + 5 * i + 1) % vocab_size for i in range(length)] for row, length in enumerate(_LENGTHS)
    ]
    tolerance = _FULL if model.dtype == torch.float32 else _HALF
    try:
        together = _logits(model, kv_shape, queries)
        each = [_logits(model, kv_shape, [query])[0] for query in queries]
    # Models that use a cache in another way fail on this one with any exception.
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model.model).__name__} is not supported: it does not run over a padded cache "
            f"({first_line(error)})"
        ) from error
    sound = 0
    for row, alone in enumerate(each):
        if not sound_rows(alone[None]).item():
            continue
        sound += 1
        difference = _difference(together[row], alone)
        if not difference <= tolerance:
            raise UnsupportedModelError(
                f"{type(model.model).__name__} is not supported: padding changes what it computes "
                f"(logits differ by {difference:.2g} of their norm, {tolerance:g} is allowed)"
            )
    if not sound:
        raise UnsupportedModelError(
            f"{type(model.model).__name__} cannot be tried: {Fault.NOT_FINITE.explain(model.dtype)}"
        )


def _difference(logits: Tensor, expected: Tensor) -> float:
    """The difference relative to the norm of `expected`, [V]. Tokens at -inf must be the same in both."""
    possible = expected.isfinite()
    if not torch.equal(logits.isneginf(), ~possible):
        return torch.inf
    return float((logits - expected)[possible].norm() / expected[possible].norm())


def _logits(model: PaddedModel, kv_shape: KVShape, queries: list[list[int]]) -> Tensor:
    """Logits of each query's last token, float32 [n, V], computed in a pass of its own after the others."""
    inputs = PaddedInputs.of(queries, model.device)
    cache = PaddedCache(kv_shape, model.device)
    cache.resize(Shape(len(queries), inputs.width))
    cache.add_rows(len(queries))
    last = inputs.width - 1
    if last:
        inputs.forward(model, cache, 0, last, [last - 1])
    return inputs.forward(model, cache, last, inputs.width, [0])[:, 0].float()
