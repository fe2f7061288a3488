"""Scores of a replay, predicted without one."""

from dataclasses import dataclass

from torch import Tensor

from winnow.eviction.predictor import PredictorSource
from winnow.eviction.rows import LayerRows
from winnow.eviction.scores.base import Scorer
from winnow.eviction.signals import Needs


@dataclass(frozen=True)
class Fitted(Scorer):
    """KVzip's score without its replay, by the predictor that `winnow fit` made for the model.

    It reads keys and values only, so it uses no queries and works in every round.
    """

    path: str | None = None
    """The predictor's file; None: the one beside the model."""

    @property
    def needs(self) -> Needs:
        return Needs(rotation=True, predictor=PredictorSource(self.path))

    def score(self, rows: LayerRows) -> Tensor:
        # The predictor returns logarithms of attention. Clamping keeps exp within float32; only the order counts.
        return rows.predicted(PredictorSource(self.path)).clamp_(-_MOST, _MOST).exp_()


_MOST = 80.0
