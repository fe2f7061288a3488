"""Scores of a replay, predicted without one."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from winnow.eviction.predictor import PredictorSource
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.scores.base import Scorer
from winnow.eviction.signals import Needs


@dataclass(frozen=True)
class Fitted(Scorer):
    """KVzip's score without its replay, by the predictor that `winnow fit` made for the model.

    It is predicted from what attention is computed from, while a token is computed, so rounds only read it.
    """

    num_accumulators: ClassVar[int] = 1
    path: str | None = None
    """The predictor's file; None: the one beside the model."""

    @property
    def needs(self) -> Needs:
        return Needs(predictor=PredictorSource(self.path))

    def score(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0]
