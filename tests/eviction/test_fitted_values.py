"""The fit of a row against a dense oracle in float64, written from the rule in docs/eviction-rules.md."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from winnow.attention import AttentionSpec
from winnow.eviction import Fit
from winnow.eviction.fit import RowKVs, RowQueries, fit_row, shares_of


def dense_fit(
    fit: Fit, queries: RowQueries, kvs: RowKVs, kept: list[int], fixed: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Biases and values of the kept KVs, the shares of all KVs, and the outputs, float64."""
    q, k, v = queries.q.double(), kvs.k.double(), kvs.v.double()
    logits = q @ k.T
    spec = queries.spec
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logits = logits + kvs.bias.double()
    age = queries.position[:, None] - kvs.position[None, :]
    if queries.slopes is not None:
        logits = logits - queries.slopes * age
    seen = (age >= 0) & (age < (spec.window or math.inf))
    logits = logits.masked_fill(~seen, -math.inf)[seen.any(dim=1)]
    shares = logits.softmax(dim=1)
    outputs = shares @ v
    a = shares[:, kept]
    free = [place for place, is_fixed in enumerate(fixed) if not is_fixed]
    rest = [place for place, is_fixed in enumerate(fixed) if is_fixed]
    weights = torch.ones(len(kept), dtype=torch.float64)
    if free:
        a_free, r = a[:, free], 1.0 - a[:, rest].sum(dim=1)
        lipschitz = (a_free.T @ a_free).sum(dim=1).max()
        w = z = torch.ones(len(free), dtype=torch.float64)
        t = 1.0
        for _ in range(fit.rounds):
            new = z + a_free.T @ (r - a_free @ z) / lipschitz
            new = new.clamp(math.exp(-fit.most_bias), math.exp(fit.most_bias))
            t_new = (1 + math.sqrt(1 + 4 * t * t)) / 2
            w, z, t = new, new + (t - 1) / t_new * (new - w), t_new
        weights[free] = w
    bias = weights.log().half().double()
    p = a * bias.exp()
    p = p / p.sum(dim=1, keepdim=True)
    values = v[kept]
    if free:
        p_free = p[:, free]
        gram = p_free.T @ p_free
        pull = fit.ridge * gram.diagonal().mean() * torch.eye(len(free), dtype=torch.float64)
        values[free] += torch.linalg.solve(gram + pull, p_free.T @ (outputs - p @ v[kept]))
    return bias, values, shares, outputs


def row(
    seed: int, count: int, num_queries: int, dim: int = 8, spread: float = 1.0, **how: float | int | None
) -> tuple[RowQueries, RowKVs]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    position = torch.randperm(2 * count, generator=generator)[:count]
    at = torch.randint(count, 3 * count, (num_queries,), generator=generator)
    slope = how.pop("slope", None)
    slopes = None if slope is None else torch.full((num_queries, 1), slope)
    spec = AttentionSpec(1.0, **how)  # type: ignore[arg-type]
    queries = RowQueries(spread * randn(num_queries, dim), at, spec, slopes)
    return queries, RowKVs(randn(count, dim), randn(count, dim), position, 0.5 * randn(count))


@pytest.mark.parametrize(
    ("count", "num_queries", "how"),
    [
        (60, 90, {}),
        (90, 20, {}),
        (60, 90, {"softcap": 2.0}),
        (60, 200, {"window": 40}),
        (12, 700, {}),
        (60, 90, {"slope": 0.1}),
    ],
    ids=["more queries", "more KVs", "softcap", "window", "few KVs", "slopes"],
)
def test_a_row_is_fitted_as_the_oracle_does(count: int, num_queries: int, how: dict[str, float]) -> None:
    queries, kvs = row(count, count, num_queries, **how)
    kept, fixed = list(range(0, count, 2)), [place < 3 for place in range(len(range(0, count, 2)))]
    fit = Fit()
    bias, values, shares, outputs = dense_fit(fit, queries, kvs, kept, fixed)
    found = shares_of(queries, kvs, torch.tensor(kept))
    torch.testing.assert_close(found.kept.double(), shares[:, kept], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.output.double(), outputs, atol=1e-5, rtol=1e-4)
    gained, moved = fit_row(fit, found, kvs.v[kept], torch.tensor(fixed))
    torch.testing.assert_close(gained.double(), bias, atol=4e-3, rtol=2e-3)  # halves may round either way
    torch.testing.assert_close(moved.double(), values, atol=2e-3, rtol=2e-3)
    assert not gained[:3].any() and torch.equal(moved[:3], kvs.v[kept][:3])


@given(
    seed=st.integers(0, 2**20),
    count=st.integers(2, 50),
    num_queries=st.integers(1, 80),
    spread=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_nothing_dropped_nothing_changed(seed: int, count: int, num_queries: int, spread: float) -> None:
    queries, kvs = row(seed, count, num_queries, spread=spread)
    queries = queries._replace(position=torch.full((num_queries,), 2 * count))
    shares = shares_of(queries, kvs, torch.arange(count))
    bias, values = fit_row(Fit(), shares, kvs.v, torch.zeros(count, dtype=torch.bool))
    torch.testing.assert_close(bias, torch.zeros(count), atol=2e-3, rtol=0)
    torch.testing.assert_close(values, kvs.v, atol=1e-3, rtol=1e-3)


@given(
    seed=st.integers(0, 2**20),
    count=st.integers(4, 60),
    num_queries=st.integers(1, 80),
    spread=st.sampled_from([0.1, 1.0, 10.0]),
    ridge=st.sampled_from([0.01, 1.0, 10.0]),
)
def test_mass_and_outputs_come_nearer(
    seed: int, count: int, num_queries: int, spread: float, ridge: float
) -> None:
    """On the reference queries, by as much as the ridge allows: |P dV - R|^2 + lambda |dV|^2 <= |R|^2."""
    queries, kvs = row(seed, count, num_queries, spread=spread)
    queries = queries._replace(position=torch.full((num_queries,), 2 * count))
    kept = torch.arange(0, count, 2)
    fixed = kept < 2
    shares, fit = shares_of(queries, kvs, kept), Fit(ridge=ridge)
    bias, values = fit_row(fit, shares, kvs.v[kept], fixed)
    mismatch = [
        (1.0 - (shares.kept * b.exp()).sum(dim=1)).square().sum() for b in (bias, torch.zeros_like(bias))
    ]
    # What is stored is rounded to half precision.
    assert mismatch[0] <= mismatch[1] * 1.01 + 1e-4 * num_queries
    p = shares.kept * bias.exp()
    p = (p / p.sum(dim=1, keepdim=True).clamp_min(1e-20)).double()
    before, after = ((shares.output - p @ v.double()).square().sum() for v in (kvs.v[kept], values))
    pull = ridge * p[:, ~fixed].square().sum() / int((~fixed).sum())
    moved = (values - kvs.v[kept]).double().square().sum()
    assert after + pull * moved <= before * 1.001 + 1e-5


def test_a_context_without_what_attention_wants_keeps_its_biases_bounded() -> None:
    """Queries whose mass went with others: weights end at the bound, and numbers stay finite."""
    queries, kvs = row(3, 40, 50, spread=30.0)
    shares = shares_of(queries, kvs, torch.arange(3))
    bias, values = fit_row(Fit(most_bias=2.0), shares, kvs.v[:3], torch.zeros(3, dtype=torch.bool))
    assert bias.abs().max() <= 2.0 and values.isfinite().all()
    kvs.k[5, 2] = torch.nan
    broken = shares_of(queries, kvs, torch.arange(3))
    fit_row(Fit(), broken, kvs.v[:3], torch.zeros(3, dtype=torch.bool))  # raises nothing
    bias, values = fit_row(Fit(), shares, kvs.v[:3], torch.ones(3, dtype=torch.bool))
    assert not bias.any() and torch.equal(values, kvs.v[:3])
