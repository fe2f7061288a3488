"""Fit of the KVs that stay to what the whole gave, one row at a time: a bias for each, and a value of its own.

For reference queries i, with l_ij the logits of the row's KVs (biases that they have included) and M_i = sum_j e^l_ij:

    A_ij = e^l_ij / M_i                      shares of the whole mass
    O_i  = sum_j A_ij v_j                    outputs of the whole row

Of the kept KVs some are fixed (sinks, last tokens, protected spans); the others, F, are fitted.

Biases: weights w_j in [e^-Fit.most_bias, e^Fit.most_bias], 1 at first, such that kept KVs have the mass of all:

    minimize sum_i (r_i - s_i)^2,   r_i = 1 - sum of A_ij over fixed j,   s_i = sum over F of A_ij w_j

by `Fit.rounds` steps of projected gradient with momentum (FISTA), z = w and t = 1 at first:

    w' = z + (r - A_F z)' A_F / L, held in the range;   L = max_j (A_F' A_F 1)_j
    t' = (1 + sqrt(1 + 4 t^2)) / 2;   z = w' + (t - 1) / t' (w' - w)

L is no less than the largest eigenvalue of A_F' A_F, whose entries are not negative. Few steps leave alone what hardly
matters. The bias of a KV grows by log w_j.

Values: with P_ij = A_ij w_j / sum_j A_ij w_j over all that is kept, ridge regression from the values as they are:

    dV = (P_F' P_F + lambda I)^-1 P_F' (O - P V),   lambda = Fit.ridge * the mean of the diagonal of P_F' P_F

The pull to the old values keeps KVs that few queries read near what they were. Source: Attention Matching
(arXiv 2602.16284), whose biases are a non-negative least squares fit, and which does not pull.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from winnow.attention import AttentionSpec
from winnow.errors import ConfigError

# Elements of a part of the attention matrix: what fits a second-level cache, twice.
_TEMPORARY = 2**19
_TINY = 1e-20


@dataclass(frozen=True)
class Fit:
    """Settings of the fit of what a round keeps to what the whole context gave its replay's queries; a policy's
    `compact`."""

    most_queries: int = 256
    """Positions whose queries are used; of more, every n-th. Each brings those of all query heads of a group."""
    rounds: int = 25
    """Steps of gradient descent for biases; 0: KVs get none."""
    most_bias: float = 4.0
    """Largest change of a bias, either way."""
    ridge: float = 1.0
    """Pull of the values towards those that they were, in mean diagonals of the Gram matrix."""

    def __post_init__(self) -> None:
        if self.most_queries < 1 or self.rounds < 0:
            raise ConfigError(
                f"most_queries of a fit must be at least 1 and rounds at least 0, got {self.most_queries} and "
                f"{self.rounds}"
            )
        for name in ("most_bias", "ridge"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"{name} of a fit must be above 0, got {getattr(self, name)}")


class RowQueries(NamedTuple):
    """Reference queries of one row, of all query heads of its group, and how they see its KVs.

    Attributes:
        q: float32 [m, d], times the scale of logits.
        position: int [m].
        spec: how they see, without what differs between heads.
        slopes: float32 [m, 1], of `AttentionSpec.slopes`; None: none.
    """

    q: Tensor
    position: Tensor
    spec: AttentionSpec
    slopes: Tensor | None = None


class RowKVs(NamedTuple):
    """All KVs of one row before a round: k [N, d], v [N, d], position int [N], bias [N]; float32 where not said."""

    k: Tensor
    v: Tensor
    position: Tensor
    bias: Tensor


class RowShares(NamedTuple):
    """Shares A of the kept KVs, float32 [m, K], and outputs O of the whole row, [m, d]."""

    kept: Tensor
    output: Tensor


def shares_of(queries: RowQueries, kvs: RowKVs, kept: Tensor) -> RowShares:
    """Return what the queries pay the KVs `kept`, int64 [K], and what the whole row gives them.

    No more than a part of the attention matrix exists at a time. Queries that see nothing are left out.
    """
    shares, outputs = [], []
    keys = kvs.k.mT.contiguous()
    step = max(1, _TEMPORARY // len(kvs.k))
    # As queries of a replay do. Each pass over the logits costs a third of a product.
    spec, slopes = queries.spec, queries.slopes
    sees_all = spec.window is None and bool(kvs.position.max() <= queries.position.min())
    has_bias = bool(kvs.bias.any())
    for start in range(0, len(queries.q), step):
        logits = queries.q[start : start + step] @ keys
        if spec.softcap is not None:
            logits = logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
        if has_bias:
            logits += kvs.bias
        now = queries.position[start : start + step, None]
        if slopes is not None:
            logits -= slopes[start : start + step] * (now - kvs.position)
        if not sees_all:
            age = now - kvs.position
            hidden = age < 0
            if spec.window is not None:
                hidden |= age >= spec.reach(now)
            logits = logits.masked_fill_(hidden, -torch.inf)[~hidden.all(dim=-1)]
        weights = logits.softmax(dim=-1)
        shares.append(weights[:, kept])
        outputs.append(weights @ kvs.v)
    return RowShares(torch.cat(shares), torch.cat(outputs))


def fit_row(fit: Fit, shares: RowShares, v: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the biases that kept KVs gain, float32 [K], and their values, [K, d]; those before were v."""
    free = ~fixed
    weights = torch.ones(len(v), device=v.device)
    if not bool(free.any()):
        return weights.log(), v
    weights[free] = _fitted_weights(fit, shares.kept, fixed)
    # Attention reads what is stored.
    bias = weights.log().half().float()
    p = shares.kept * bias.exp()
    p /= p.sum(dim=-1, keepdim=True).clamp_min_(_TINY)
    values = v.clone()
    values[free] += _ridge(p[:, free], shares.output - p @ v, fit.ridge)
    return bias, values


def _fitted_weights(fit: Fit, shares: Tensor, fixed: Tensor) -> Tensor:
    of_free = shares[:, ~fixed]
    missing = (1.0 - shares[:, fixed].sum(dim=-1)) @ of_free
    gram = of_free.mT @ of_free if of_free.shape[1] <= of_free.shape[0] else None

    def products(w: Tensor) -> Tensor:
        return (of_free @ w) @ of_free if gram is None else gram @ w

    weights = torch.ones(of_free.shape[1], device=shares.device)
    step = 1.0 / products(weights).amax().clamp_min(_TINY)
    most = math.exp(fit.most_bias)
    ahead, t = weights, 1.0
    for _ in range(fit.rounds):
        moved = (ahead + step * (missing - products(ahead))).clamp_(1.0 / most, most)
        t, before = (1.0 + math.sqrt(1.0 + 4.0 * t * t)) / 2.0, t
        ahead, weights = moved + (before - 1.0) / t * (moved - weights), moved
    return weights


def _ridge(p: Tensor, residual: Tensor, ridge: float) -> Tensor:
    """Return x, [K, d], with the least |p x - residual|^2 + lambda |x|^2, p [m, K], by the smaller of two systems."""
    pull = ridge * p.square().sum() / max(p.shape[1], 1) + _TINY
    few = p.shape[1] <= p.shape[0]
    gram = p.mT @ p if few else p @ p.mT
    gram.diagonal().add_(pull)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed):  # numbers that are not finite, which fail their request by themselves
        return residual.new_zeros(p.shape[1], residual.shape[1])
    if few:
        return torch.cholesky_solve(p.mT @ residual, factor)
    return p.mT @ torch.cholesky_solve(residual, factor)
