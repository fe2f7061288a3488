"""What a predictor that was fitted to the model expects a replay to say."""

from dataclasses import dataclass

from torch import Tensor

from winnow.eviction.predictor import PredictorSource
from winnow.eviction.rows import LayerRows
from winnow.eviction.scores.base import Scorer
from winnow.eviction.signals import Needs


@dataclass(frozen=True)
class Fitted(Scorer):
    """KVzip's score without its replay, as a predictor expects it that `winnow fit` made for the model.

    It reads what the cache stores of a KV, so it needs no queries and holds in every round.
    """

    path: str | None = None
    """The predictor's file; None: the one beside the model."""

    @property
    def needs(self) -> Needs:
        return Needs(rotation=True, predictor=PredictorSource(self.path))

    def score(self, rows: LayerRows) -> Tensor:
        # The predictor knows logarithms of attention. Its order is what counts, within what float32 can hold.
        return rows.predicted(PredictorSource(self.path)).clamp_(-_MOST, _MOST).exp_()


_MOST = 80.0
