"""Check at load, that padding does not change what a model computes."""

import torch
from torch import Tensor

from winnow.errors import UnsupportedModelError
from winnow.models.load.damage import first_line
from winnow.sampling.rows import Fault, sound_rows
from winnow_lab.padded.cache import PaddedCache, Shape
from winnow_lab.padded.model import PaddedModel
from winnow_lab.padded.prefill import PaddedInputs
from winnow_lab.padded.shape import KVShape

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
    """Return the difference relative to the norm of `expected`, [V]. Tokens at -inf must be the same in both."""
    possible = expected.isfinite()
    if not torch.equal(logits.isneginf(), ~possible):
        return torch.inf
    return float((logits - expected)[possible].norm() / expected[possible].norm())


def _logits(model: PaddedModel, kv_shape: KVShape, queries: list[list[int]]) -> Tensor:
    """Return logits of each query's last token, float32 [n, V], computed in a pass of its own after the others."""
    inputs = PaddedInputs.of(queries, model.device)
    cache = PaddedCache(kv_shape, model.device)
    cache.resize(Shape(len(queries), inputs.width))
    cache.add_rows(len(queries))
    last = inputs.width - 1
    if last:
        inputs.forward(model, cache, 0, last, [last - 1])
    return inputs.forward(model, cache, last, inputs.width, [0])[:, 0].float()
