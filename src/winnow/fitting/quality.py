"""Evaluate predictors on held-out texts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import torch
from torch import Tensor

from winnow.eviction.predictor import Predictor
from winnow.fitting.collect import Collected

SHARE = 0.25
"""The share of KVs that 4x compression keeps."""


@dataclass(frozen=True)
class Quality:
    """Means over texts.

    Attributes:
        recall: share of the replay's best quarter of all KVs that is in the predictor's best quarter; 0.25 by chance.
        row_recall: the same within each row.
        correlation: Spearman's, over all KVs of a text.
        keydiff_row_recall: `row_recall` of KeyDiff's score, which compares KVs within a row only.
    """

    recall: float
    row_recall: float
    correlation: float
    keydiff_row_recall: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def judge(predictor: Predictor, texts: Sequence[Collected]) -> Quality:
    """Evaluate a predictor on texts."""
    found = [_of_text(predictor, text) for text in texts]
    return Quality(*(fmean(column) for column in zip(*found, strict=True)))


def predicted(predictor: Predictor, text: Collected) -> Tensor:
    """The predicted scores of a text, float32 [L, H, T]."""
    layers = range(len(text.scores))
    return torch.stack(
        [predictor.predict(i, text.keys[i].float()[None], text.values[i].float()[None])[0] for i in layers]
    )


def recall(guessed: Tensor, true: Tensor) -> float:
    """Share of the best quarter of `true`, [..., T], that is in the best quarter of `guessed`; the mean over rows."""
    count = max(1, round(true.shape[-1] * SHARE))
    held = torch.zeros(true.shape, dtype=torch.bool).scatter_(-1, guessed.topk(count).indices, True)
    return float(held.gather(-1, true.topk(count).indices).float().mean())


def _of_text(predictor: Predictor, text: Collected) -> tuple[float, float, float, float]:
    guessed = predicted(predictor, text)
    return (
        recall(guessed.flatten(), text.scores.flatten()),
        recall(guessed, text.scores),
        _spearman(guessed.flatten(), text.scores.flatten()),
        recall(text.baseline, text.scores),
    )


def _spearman(guessed: Tensor, true: Tensor) -> float:
    """Rank correlation."""
    ranks = torch.stack([each.argsort().argsort().double() for each in (guessed, true)])
    return float(torch.corrcoef(ranks)[0, 1])
