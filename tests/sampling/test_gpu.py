"""Triton's kernels of sampling against the plain form, in the interpreter where there is no GPU."""

import pytest
import torch
from sampling_support import random_logits
from torch import Tensor

pytest.importorskip("triton")
from winnow.sampling import triton_kernels as gpu
from winnow.sampling.filters import keep_top, open_argmax, open_keep_top, scale
from winnow.sampling.rows import clean_rows, mark_faults

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is more than a program has in registers."""
    monkeypatch.setattr(gpu, "_BLOCK", 32)


def test_gpus_take_them() -> None:
    assert open_argmax(torch.device("cuda")) is gpu.marked_argmax
    assert open_keep_top(torch.device("cuda")) is gpu.keep_top
    assert open_keep_top(torch.device("cpu")) is keep_top


def plain_argmax(logits: Tensor) -> Tensor:
    return mark_faults(clean_rows(logits).argmax(1), logits)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1, torch.float32),
        (32, torch.float32),
        *((97, d) for d in (torch.float32, torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_argmax_takes_the_first_of_equals(dtype: torch.dtype, size: int) -> None:
    logits = random_logits(4, size, seed=size).to(DEVICE)
    for rows in (logits.to(dtype), logits.round().to(dtype), logits[:2, :1].expand(2, size).to(dtype)):
        assert torch.equal(gpu.marked_argmax(rows), plain_argmax(rows))
    wide = random_logits(4, 3 * size, seed=1).to(dtype).to(DEVICE)
    for rows in (wide[:, size : 2 * size], wide.T[:4]):
        assert torch.equal(gpu.marked_argmax(rows), plain_argmax(rows))


def test_argmax_marks_rows_without_a_token() -> None:
    rows = torch.full((7, 70), -INF, device=DEVICE)
    rows[1] = NAN
    rows[2, 60], rows[2, 5] = NAN, 3.0
    rows[3, 40], rows[3, 1] = INF, 2.0
    rows[4, 69] = -1e30
    rows[5, 33] = rows[5, 65] = -2.0
    rows[6, :2] = torch.tensor([-0.0, 0.0])
    assert gpu.marked_argmax(rows).tolist() == [-1, -1, -1, -1, 69, 33, 0]
    assert torch.equal(gpu.marked_argmax(rows), plain_argmax(rows))


def filtered_rows() -> Tensor:
    """Scaled rows: random, with ties, with impossible tokens, nearly certain, all equal, and with nothing possible."""
    logits = random_logits(8, 60, seed=3, scale=3.0)
    logits[1:3] = logits[1:3].round()
    logits[3, ::2] = -INF
    logits[4, 8] = 20.0
    logits[5] = 1.0
    logits[6] = -INF
    logits[7, 1:] = -INF
    logits = logits.to(DEVICE)
    scale(logits, torch.linspace(0.3, 2.0, 8, device=DEVICE)[:, None])
    return logits


# Of each kind of row some: its number, top-k and top-p.
FILTERS = [
    *((0, 20, 0.9987), (0, 1, 0.93), (1, 20, 0.77), (2, 60, 0.9987), (3, 40, 0.93)),
    *((4, 5, 0.9987), (5, 20, 0.77), (6, 5, 0.013), (7, 20, 0.93)),
]


@pytest.mark.parametrize(
    ("use_k", "use_p", "filters"),
    [(True, False, FILTERS[2:5]), (False, True, FILTERS[1:6:2]), (True, True, FILTERS)],
    ids=["k", "p", "both"],
)
def test_top_k_and_top_p_keep_what_sorting_keeps(
    use_k: bool, use_p: bool, filters: list[tuple[int, int, float]]
) -> None:
    rows, every_k, every_p = zip(*filters, strict=True)
    found = filtered_rows()[list(rows)]
    expected = found.clone()
    top_k = torch.tensor(every_k, device=DEVICE) if use_k else None
    top_p = torch.tensor(every_p, device=DEVICE, dtype=torch.float64) if use_p else None
    gpu.keep_top(found, top_k, max(every_k), top_p)
    keep_top(expected, top_k, max(every_k), top_p)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    kept = (~found.isneginf()).sum(1).tolist()
    assert len(set(kept)) > 2
    for row, each in zip(rows, found, strict=True):
        assert each.isnan().all() == (row == 6), "nothing possible passes"


def test_the_whole_mass_keeps_all_that_is_possible() -> None:
    # Row 0 holds tokens of less than the last bit of a float64, and row 6 is NaN.
    rows = filtered_rows()[[1, 3, 4, 5]]
    logits = rows.clone()
    gpu.keep_top(logits, None, 0, torch.ones(4, device=DEVICE, dtype=torch.float64))
    assert torch.equal(logits, rows)
