"""Leverage of keys, by torch and by the CPU kernels, held against the formula in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from winnow.attention import PagedCache, Pool
from winnow.attention.observation import smooth
from winnow.cache import CacheLayout, CacheManager, CacheSize, KVPool
from winnow.eviction import Leverage
from winnow.eviction.rows import LayerRows, Round, RoundRows
from winnow.eviction.scores.leverage import native_leverage, torch_leverage

_native = pytest.importorskip("winnow._native", reason="built without a compiler")
KERNELS = {name: _native.Kernels(name) for name in _native.instruction_sets()}
HEADS = 2


@dataclass(frozen=True)
class Case:
    """Rows of some lengths, [sequences][heads], with random keys."""

    lengths: Sequence[Sequence[int]]
    head_dim: int
    dtype: torch.dtype
    block_size: int = 4
    seed: int = 0

    def rows(self) -> LayerRows:
        """The second of two layers, with positions in any order and blocks anywhere."""
        generator = torch.Generator().manual_seed(self.seed)
        longest = max(max(row) for row in self.lengths)
        layout = CacheLayout(2, HEADS, self.head_dim, self.block_size, self.dtype)
        blocks = len(self.lengths) * layout.blocks_for(longest)
        manager = CacheManager(
            layout, CacheSize.of_blocks(layout, blocks, len(self.lengths), longest, uneven_rows=True)
        )
        pool = KVPool(layout, blocks)
        slots = [manager.open() for _ in self.lengths]
        for done in range(0, longest, 3):  # in turn, so that blocks of all rows lie among each other
            manager.append(slots, [min(3, longest - done)] * len(slots))
        manager.shrink(slots, torch.tensor(self.lengths)[:, None].expand(-1, 2, -1).numpy())
        # Some directions hardly vary, and most of a key is what all of them share.
        scale = torch.rand(self.head_dim, generator=generator).square()
        common = 3 * torch.randn(self.head_dim, generator=generator)
        pool.k.copy_(torch.randn(pool.k.shape, generator=generator) * scale + common)
        order = torch.randperm(pool.position.numel(), generator=generator)
        pool.position.copy_(order.view_as(pool.position) * 37)
        column = torch.zeros(len(slots), dtype=torch.int64)
        round_ = Round(
            tuple(slots), column, column, 0, column, tuple(() for _ in slots), column, torch.empty(0)
        )
        return RoundRows(PagedCache(pool, manager), round_, longest, None).layer(1)


def formula(rows: LayerRows, ridge: float) -> Tensor:
    """x^T (S + ridge m I)^-1 x, row by row in float64; zeros where not valid."""
    worth = torch.zeros(rows.valid.shape, dtype=torch.float64)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in rows.length.shape)):
        b, h = place.tolist()
        n = int(rows.length[b, h])
        if n == 0:
            continue
        x = rows.pool.k.flatten(0, 1)[rows.slot[b, h, :n]].double()
        x = x - x.mean(dim=0)
        moment = x.T @ x / n
        spread = moment.diagonal().mean().clamp_min(1e-12)
        inverse = torch.linalg.inv(moment + ridge * spread * torch.eye(len(moment)))
        worth[b, h, :n] = ((x @ inverse) * x).sum(dim=-1)
    return worth


LENGTHS = st.lists(
    st.lists(st.integers(0, 150), min_size=HEADS, max_size=HEADS), min_size=1, max_size=3
).filter(lambda rows: max(map(max, rows)) > 0)
CASES = st.builds(
    Case,
    LENGTHS,
    head_dim=st.sampled_from([1, 6, 12, 16, 40, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)


@settings(max_examples=60, deadline=None)
@given(case=CASES, ridge=st.sampled_from([0.01, 0.1, 1.0]))
def test_leverage_is_the_formula(case: Case, ridge: float) -> None:
    rows = case.rows()
    expected = formula(rows, ridge).float()
    torch.testing.assert_close(torch_leverage(rows, ridge), expected, rtol=5e-4, atol=5e-4)
    for name, kernels in KERNELS.items():
        found = native_leverage(kernels, rows, ridge, None)
        torch.testing.assert_close(
            found, expected, rtol=5e-4, atol=5e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@settings(max_examples=60, deadline=None)
@given(case=CASES, pool=st.builds(Pool, st.sampled_from([1, 3, 7]), st.sampled_from(["max", "average"])))
def test_neighbours_are_pooled_in_order_of_position(case: Case, pool: Pool) -> None:
    rows = case.rows()
    for kernels in KERNELS.values():
        alone = native_leverage(kernels, rows, 0.1, None)
        expected = smooth(alone[:, :, None], rows.position, rows.valid, pool)[:, :, 0]
        found = native_leverage(kernels, rows, 0.1, pool)
        torch.testing.assert_close(found[rows.valid], expected[rows.valid], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_does_not_feel_other_rows_or_threads(name: str) -> None:
    case = Case([[700, 300], [64, 65]], 64, torch.bfloat16)
    together = case.rows()
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(native_leverage(KERNELS[name], together, 0.1, Pool(3, "average")))
    torch.set_num_threads(threads)
    assert torch.equal(*found)
    alone = case.rows()
    alone.slot, alone.position, alone.length = alone.slot[1:], alone.position[1:], alone.length[1:]
    assert torch.equal(native_leverage(KERNELS[name], alone, 0.1, Pool(3, "average")), found[0][1:])


@pytest.mark.parametrize("name", KERNELS)
def test_keys_that_are_all_alike_are_worth_nothing(name: str) -> None:
    rows = Case([[40, 1]], 64, torch.bfloat16).rows()
    rows.pool.k.copy_(torch.full_like(rows.pool.k, 1.5))
    assert not native_leverage(KERNELS[name], rows, 0.1, None).any()
    assert not torch_leverage(rows, 0.1).any()


def test_the_score_takes_the_kernels_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Case([[90, 33]], 64, torch.bfloat16).rows()
    score = Leverage(pool=Pool(3, "average"))
    by_kernels = score.worth(rows)
    monkeypatch.setattr("winnow.eviction.scores.leverage.native_kernels", lambda: None)
    torch.testing.assert_close(by_kernels[rows.valid], score.worth(rows)[rows.valid], rtol=5e-4, atol=5e-4)
