"""Scorers from all queries of the context: expected future attention, and attention within chunks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.errors import ConfigError
from winnow.eviction.probes import ChunkProbe, MomentsProbe
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.scores.base import Scorer
from winnow.eviction.signals import Needs


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Expected attention from future queries (Devoto et al., "Expected Attention", 2025).

    Future queries are modelled as normal, with the mean and covariance of the context's unrotated queries, rotated by
    the mean of the rotations to the next `horizon` positions. A key's share is the softmax over the
    row of mean^T k + k^T covariance k / 2, with the model's own factor on logits; the mean over the query group.
    """

    horizon: int = 512
    skip: int = 4
    """Number of first positions to exclude: their queries are outliers, and their keys get the layer's largest
    share."""

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.skip < 0:
            raise ConfigError(
                f"horizon must be at least 1 and skip at least 0, got {self.horizon} and {self.skip}"
            )

    @property
    def needs(self) -> Needs:
        return Needs((MomentsProbe,), moments_from=self.skip, rotation=True)

    def score(self, rows: LayerRows) -> Tensor:
        keys, counted = rows.keys(), rows.valid & (rows.position >= self.skip)
        share = torch.zeros_like(keys[..., 0])
        mean, covariance = self._queries(rows, num_heads=keys.shape[1])
        group = mean.shape[2]
        for member in range(group):  # one query head per group at a time bounds temporaries
            logits = (keys @ mean[:, :, member, :, None])[..., 0]
            logits += (keys @ covariance[:, :, member]).mul_(keys).sum(dim=-1) / 2
            share += logits.masked_fill_(~counted, -torch.inf).softmax(dim=-1).nan_to_num_(0.0)
        share /= group
        most = rows.over_ranks(share).amax(dim=(1, 2), keepdim=True)
        return torch.where(counted, share, most.expand_as(share))

    def _queries(self, rows: LayerRows, num_heads: int) -> tuple[Tensor, Tensor]:
        """Return the mean [B, H, g, d] and covariance [B, H, g, d, d] of future queries."""
        moments = rows.probe(MomentsProbe).of(rows.layer, rows.round.slots, rows.query_shape)
        turn = rows.mean_rotation(self.horizon)[:, None]
        mean = (turn @ moments.mean[..., None])[..., 0]
        covariance = turn @ moments.covariance @ turn.mT
        return mean.unflatten(1, (num_heads, -1)), covariance.unflatten(1, (num_heads, -1))


@dataclass(frozen=True)
class ChunkAttention(Scorer):
    """Non-causal attention within chunks of the context (Compactor).

    The sum over the chunk's queries of softmax(q^T k), with unscaled logits as in the method's code; the mean
    over the query group. KVs after the context get 0.
    """

    chunk: int = 256
    skip: int = 0
    """The first chunk begins at this position; earlier KVs get 0."""

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.skip < 0:
            raise ConfigError(
                f"chunk must be at least 1 and skip at least 0, got {self.chunk} and {self.skip}"
            )

    @property
    def needs(self) -> Needs:
        return Needs((ChunkProbe,), chunk=self.chunk, chunk_from=self.skip)

    def score(self, rows: LayerRows) -> Tensor:
        numbers = rows.probe(ChunkProbe).of(rows.layer, rows.round.slots, rows.position.shape[1])
        return rows.by_position(numbers)
