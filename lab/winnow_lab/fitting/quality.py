"""Quality of predictors on held-out texts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import torch
from torch import Tensor

from winnow.eviction.predictor import Predictor
from winnow_lab.fitting.collect import Collected


@dataclass(frozen=True)
class Quality:
    """Means over texts.

    Attributes:
        recall_4x: share of the replay's best quarter of all KVs that is in the predictor's best quarter; by chance 1/4.
        recall_8x: the same of the best eighth; by chance 1/8.
        correlation: Spearman's, over all KVs of a text.
    """

    recall_4x: float
    recall_8x: float
    correlation: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def judge(predictor: Predictor, texts: Sequence[Collected]) -> Quality:
    """Evaluate a predictor on texts."""
    found = [_of_text(predictor, text) for text in texts]
    return Quality(*(fmean(column) for column in zip(*found, strict=True)))


def predicted(predictor: Predictor, text: Collected) -> Tensor:
    """Return the logarithms of the predicted scores of a text, float32 [L, H, T]."""
    return torch.stack([predictor.logs(layer, x.float()).T for layer, x in enumerate(text.features)])


def recall(guessed: Tensor, true: Tensor, compression: int) -> float:
    """Share of the KVs that `true`, [n], keeps at a compression which `guessed` keeps too."""
    count = max(1, round(len(true) / compression))
    held = torch.zeros(true.shape, dtype=torch.bool, device="cpu").scatter_(
        -1, guessed.topk(count).indices, True
    )
    return float(held[true.topk(count).indices].float().mean())


def _of_text(predictor: Predictor, text: Collected) -> tuple[float, float, float]:
    guessed, true = predicted(predictor, text).flatten(), text.scores.flatten()
    return recall(guessed, true, 4), recall(guessed, true, 8), _spearman(guessed, true)


def _spearman(guessed: Tensor, true: Tensor) -> float:
    ranks = torch.stack([each.argsort().argsort().double() for each in (guessed, true)])
    return float(torch.corrcoef(ranks)[0, 1])
