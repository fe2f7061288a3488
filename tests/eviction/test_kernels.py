"""The CPU kernels of a round: scores of keys against their formulas in float64, and who stays against torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings, strategies as st
from tests.attention.paged import contents_of
from torch import Tensor

_native = pytest.importorskip("winnow._native")
from winnow.attention import Smoothing  # noqa: E402
from winnow.attention.native import NativeBackend  # noqa: E402
from winnow.attention.observer import smooth  # noqa: E402
from winnow.attention.reference import ReferenceBackend  # noqa: E402
from winnow.cache import CacheLayout, CacheSize, LocalCache  # noqa: E402
from winnow.eviction import KeyDifference, Leverage, Scorer  # noqa: E402
from winnow.eviction.costs import Ranking  # noqa: E402
from winnow.eviction.kernels import RowKernels  # noqa: E402
from winnow.eviction.round_rows import LayerRows, RoundInputs, RoundRows  # noqa: E402
from winnow.eviction.scores.keys import key_difference, ridge_leverage  # noqa: E402
from winnow.eviction.signals import KeyDirections  # noqa: E402
from winnow.models.bind.rotation import LayerRotation  # noqa: E402

pytestmark = pytest.mark.cpu

KERNELS = {name: _native.Kernels(name) for name in _native.instruction_sets()}
HEADS = 2


@dataclass(frozen=True)
class Case:
    """Rows of some lengths, [sequences][heads], with random keys."""

    lengths: Sequence[Sequence[int]]
    head_dim: int
    dtype: torch.dtype | str
    """Or the name of a format."""
    block_size: int = 4
    seed: int = 0

    def rows(self) -> LayerRows:
        """The second of two layers."""
        return self.all_rows().layer(1)

    def all_rows(self) -> RoundRows:
        """Two layers, with positions in any order and blocks anywhere."""
        generator = torch.Generator().manual_seed(self.seed)
        longest = max(max(row) for row in self.lengths)
        layout = CacheLayout.even(2, HEADS, self.head_dim, self.block_size, self.dtype)
        blocks = len(self.lengths) * layout.blocks_for(longest)
        local = LocalCache(layout, CacheSize.of_blocks(layout, blocks, len(self.lengths), longest))
        ledger, pool = local.ledger, local.paged.pool
        slots = [ledger.open() for _ in self.lengths]
        for done in range(0, longest, 3):  # in turn, so that blocks of all rows lie among each other
            ledger.append(slots, [min(3, longest - done)] * len(slots))
        ledger.shrink(slots, torch.tensor(self.lengths)[:, None].expand(-1, 2, -1).numpy())
        local.sync()
        # Some directions vary little, and most of a key is what all of them share.
        scale = 0.1 + torch.rand(self.head_dim, generator=generator).square()
        common = 3 * torch.randn(self.head_dim, generator=generator)
        slot = torch.arange(pool.position.numel())
        keys = torch.randn(len(slot), self.head_dim, generator=generator) * scale + common
        pool.of_layer(-1).write(slot, keys, keys, slot)
        order = torch.randperm(pool.position.numel(), generator=generator)
        pool.position.copy_(order.view_as(pool.position) * 37)
        column = torch.zeros(len(slots), dtype=torch.int64)
        round_ = RoundInputs(tuple(slots), column, column, 0, column, tuple(() for _ in slots), column)
        return RoundRows(local.paged, round_, tuple(range(local.paged.pool.layout.num_layers)), longest)


def row_by_row(rows: LayerRows, formula: Callable[[Tensor], Tensor]) -> Tensor:
    """A formula of a row's keys, [n, d] in float64, for all rows, as float32; zeros where not valid."""
    score = torch.zeros(rows.valid.shape, dtype=torch.float64)
    for b, h in torch.cartesian_prod(*(torch.arange(n) for n in rows.length.shape)).tolist():
        n = int(rows.length[b, h])
        if n > 0:
            score[b, h, :n] = formula(rows.pool.keys(rows.slot[b, h, :n]).double())
    return score.float()


def leverages(keys: Tensor, ridge: float) -> Tensor:
    """x^T (S + ridge m I)^-1 x."""
    x = keys - keys.mean(dim=0)
    moment = x.T @ x / len(x)
    spread = moment.diagonal().mean().clamp_min(1e-12)
    inverse = torch.linalg.inv(moment + ridge * spread * torch.eye(len(moment)))
    return ((x @ inverse) * x).sum(dim=-1)


def differences(keys: Tensor) -> Tensor:
    """Minus the cosine of each key and the mean of all, normalised."""
    directions = F.normalize(keys, dim=-1)
    return -directions @ F.normalize(directions.mean(dim=0), dim=0)


LENGTHS = st.lists(
    st.lists(st.integers(0, 150), min_size=HEADS, max_size=HEADS), min_size=1, max_size=3
).filter(lambda rows: max(map(max, rows)) > 0)
CASES = st.one_of(
    st.builds(
        Case,
        LENGTHS,
        head_dim=st.sampled_from(head_dims),
        dtype=st.sampled_from(kinds),
        block_size=st.sampled_from([1, 4, 16]),
        seed=st.integers(0, 99),
    )
    for head_dims, kinds in (
        ([1, 6, 12, 16, 40, 64, 80], [torch.float32, torch.bfloat16, torch.float16, "int8", "fp8_e4m3"]),
        ([16, 40, 64, 80], ["int4", "int4-outlier", "int3", "int2", "k=int4,v=bfloat16"]),
    )
)


def lost_in_centring(keys: Tensor) -> Tensor:
    """What float32 may lose of a row's leverages when the mean is taken off: much where all keys are nearly one."""
    spread = (keys - keys.mean(dim=0)).square().mean().sqrt()
    off = torch.finfo(torch.float32).eps * keys.abs().max() / spread.clamp_min(1e-6)
    # x / spread is at most the root of the number of keys, and the leverage is about its square.
    return (8 * len(keys) ** 0.5 * off).expand(len(keys))


@given(case=CASES, ridge=st.sampled_from([0.01, 0.1, 1.0]))
@example(case=Case([[0, 2]], head_dim=1, dtype=torch.float32, block_size=1, seed=60), ridge=0.01)
def test_leverage_is_the_formula(case: Case, ridge: float) -> None:
    rows = case.rows()
    expected = row_by_row(rows, lambda keys: leverages(keys, ridge))
    tolerance = 5e-4 + float(row_by_row(rows, lost_in_centring).max())
    found = ridge_leverage(rows.keys(), rows.valid, ridge)
    torch.testing.assert_close(found, expected, rtol=5e-4, atol=tolerance)
    for kernels in KERNELS.values():
        found = RowKernels(kernels, rows).leverage(ridge)
        torch.testing.assert_close(found, expected, rtol=5e-4, atol=tolerance)


def lost_in_the_mean(keys: Tensor) -> Tensor:
    """What float32 may lose of a row's differences: all where its directions cancel and their mean points nowhere."""
    mean = F.normalize(keys, dim=-1).mean(dim=0).norm().clamp_min(1e-12)
    return (torch.finfo(torch.float32).eps / mean).clamp_max(2.0).expand(len(keys))


@given(case=CASES)
@example(case=Case([[72, 2]], head_dim=1, dtype=torch.float32, block_size=1))
def test_key_difference_is_the_formula(case: Case) -> None:
    rows = case.rows()
    expected = row_by_row(rows, differences)
    tolerance = 1e-5 + float(row_by_row(rows, lost_in_the_mean).max())
    for found in (
        key_difference(rows),
        *(RowKernels(kernels, rows).key_difference() for kernels in KERNELS.values()),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=tolerance)


@given(case=CASES, data=st.data())
def test_key_deviation_is_the_formula(case: Case, data: st.DataObject) -> None:
    """Against directions in float64 before rotation, with some keys counted before, and sums of keys that are gone."""
    rows = case.rows()
    # Positions as they come after rounds: any, in any order, but not far.
    rows.position = rows.position // 37 % 4096
    size = case.head_dim
    pairs = data.draw(st.integers(0, size // 2), label="pairs")
    first = data.draw(st.sampled_from([0, size - 2 * pairs]), label="first")
    interleaved = data.draw(st.booleans(), label="interleaved")
    frequencies = torch.logspace(0, -2, pairs)
    rotation = LayerRotation(frequencies, interleaved, first)
    batch, heads = rows.length.shape
    counted = torch.randint(
        0, 4096, (batch,), dtype=torch.int32, generator=torch.Generator().manual_seed(case.seed)
    )
    before = torch.randn(batch, heads, size, generator=torch.Generator().manual_seed(case.seed)) * 30

    def turned_back(b: int, h: int) -> Tensor:
        n = int(rows.length[b, h])
        keys, at = rows.pool.keys(rows.slot[b, h, :n]).double(), rows.position[b, h, :n].double()
        angle = -at[:, None] * frequencies.double()
        exact = LayerRotation(frequencies.double(), interleaved, first)
        return exact._turned(keys, angle.cos(), angle.sin())

    expected, sums = torch.zeros(rows.valid.shape, dtype=torch.float64), before.double().clone()
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        n = int(rows.length[b, h])
        directions = F.normalize(turned_back(b, h), dim=-1, eps=1e-12)
        sums[b, h] += directions[rows.position[b, h, :n] >= counted[b]].sum(dim=0)
        expected[b, h, :n] = -directions @ F.normalize(sums[b, h], dim=0, eps=1e-12)
    # float32 angles are off by position * epsilon, a sum that nearly cancels points anywhere.
    least = sums.norm(dim=-1)[..., None].clamp_min(1e-6)
    tolerance = 1e-3 + 1e-3 * rows.length[..., None] / least
    for kernels in KERNELS.values():
        found = KeyDirections(before.clone(), counted)
        score = RowKernels(kernels, rows).key_difference(found, rotation.table(4096))
        assert ((score - expected).abs() <= tolerance).all()
        torch.testing.assert_close(found.sums, sums.float(), rtol=1e-3, atol=2e-3)


@given(case=CASES, pool=st.builds(Smoothing, st.sampled_from([1, 3, 7]), st.sampled_from(["max", "average"])))
def test_neighbours_are_pooled_in_order_of_position(case: Case, pool: Smoothing) -> None:
    rows = case.rows()
    for name in KERNELS:
        kernels = RowKernels(KERNELS[name], rows)
        alone = kernels.leverage(0.1)
        expected = smooth(alone[:, :, None], rows.position, rows.valid, pool)[:, :, 0]
        found = kernels.pooled(alone, pool)
        torch.testing.assert_close(found[rows.valid], expected[rows.valid], rtol=1e-6, atol=1e-6)


def scored(name: str, rows: LayerRows) -> Tensor:
    """By both kernels of an instruction set, [2, B, H, N]."""
    kernels = RowKernels(KERNELS[name], rows)
    return torch.stack(
        [kernels.pooled(kernels.leverage(0.1), Smoothing(3, "average")), kernels.key_difference()]
    )


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_does_not_feel_other_rows_or_threads(name: str) -> None:
    case = Case([[700, 300], [64, 65]], 64, torch.bfloat16)
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(scored(name, case.rows()))
    torch.set_num_threads(threads)
    assert torch.equal(*found)
    alone = case.rows()
    alone.slot, alone.position, alone.length = alone.slot[1:], alone.position[1:], alone.length[1:]
    assert torch.equal(scored(name, alone), found[0][:, 1:])


@pytest.mark.parametrize("name", KERNELS)
def test_keys_that_are_all_alike_are_worth_nothing_by_leverage(name: str) -> None:
    rows = Case([[40, 1]], 64, torch.bfloat16).rows()
    rows.pool.k.copy_(torch.full_like(rows.pool.k, 1.5))
    assert not RowKernels(KERNELS[name], rows).leverage(0.1).any()
    assert not ridge_leverage(rows.keys(), rows.valid, 0.1).any()


@pytest.mark.parametrize("scorer", [Leverage(), Leverage(pool=Smoothing(3, "average")), KeyDifference()])
def test_scores_agree_without_the_kernels(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Case([[90, 33]], 64, torch.bfloat16).rows()
    by_kernels = scorer.score(rows)
    monkeypatch.setattr("winnow.eviction.kernels.native_kernels", lambda: None)
    torch.testing.assert_close(by_kernels[rows.valid], scorer.score(rows)[rows.valid], rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("isa", KERNELS)
@settings(max_examples=20)
@given(case=CASES, data=st.data())
def test_those_stay_that_torch_would_keep(isa: str, case: Case, data: st.DataObject) -> None:
    """The same KVs in the same slots, whatever the rows, with many equals among them."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def choose(values: list[float]) -> Tensor:
        """Some of them for all slots."""
        return torch.tensor(values)[torch.randint(len(values), shape, generator=generator)]

    ours, theirs = case.all_rows(), case.all_rows()
    shape = ours.position.shape
    score = choose([-1.5, -0.0, 0.0, 1e-30, 0.25, 7.0, 1e30])
    score = torch.where(ours.valid, score, math.nan)
    must_stay = (choose([0.0, 0.0, 0.0, 1.0]) > 0) & ours.valid
    protected = must_stay.sum(dim=-1)
    kept = (
        protected + ((ours.length + 1 - protected) * torch.rand(protected.shape, generator=generator)).long()
    )
    for rows in (ours, theirs):
        filling = torch.Generator().manual_seed(5)
        pool = rows.cache.pool
        pool.of_layer(-1).storage.random_(0, 256, generator=filling)
        pool.accumulators.copy_(torch.randn(pool.accumulators.shape, generator=filling))

    for backend, rows in ((NativeBackend(KERNELS[isa]), ours), (ReferenceBackend(), theirs)):
        ranked = Ranking(rows, score, must_stay).ranked
        backend.keep_best(rows.cache.pool, ranked, kept, int((rows.length - kept).max()))
    for found, expected in zip(*(contents_of(rows.cache.pool) for rows in (ours, theirs)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_rows_where_a_position_comes_twice_do_no_harm() -> None:
    """No cache has such rows; if one came to be, nothing outside of it may be touched."""
    rows = Case([[30, 30]], head_dim=8, dtype=torch.float32).all_rows()
    pool = rows.cache.pool
    pool.position.zero_()
    before = pool.of_layer(-1).storage.clone()
    score = torch.zeros(rows.position.shape)
    kept = torch.full(rows.length.shape, 10)
    backend = NativeBackend(KERNELS["generic"])
    ranked = Ranking(rows, score, torch.zeros_like(rows.valid)).ranked
    backend.keep_best(pool, ranked, kept, 20)
    outside = torch.ones(pool.num_blocks, dtype=torch.bool)
    outside[rows.block.flatten()] = False
    assert torch.equal(pool.of_layer(-1).storage[outside], before[outside])
