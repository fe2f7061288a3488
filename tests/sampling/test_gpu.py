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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 31, 32, 97])
def test_argmax_takes_the_first_of_equals(dtype: torch.dtype, size: int) -> None:
    logits = random_logits(6, size, seed=size).to(DEVICE)
    for rows in (logits.to(dtype), logits.round().to(dtype), logits[:, :1].expand(6, size).to(dtype)):
        assert torch.equal(gpu.marked_argmax(rows), plain_argmax(rows))
    wide = random_logits(6, 3 * size, seed=1).to(dtype).to(DEVICE)
    for rows in (wide[:, size : 2 * size], wide.T[:6]):
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


@pytest.mark.parametrize(("use_k", "use_p"), [(True, False), (False, True), (True, True)])
def test_top_k_and_top_p_keep_what_sorting_keeps(use_k: bool, use_p: bool) -> None:
    kept_sizes = set()
    for k, p in ((1, 0.013), (20, 0.93), (60, 0.9987))[use_k and use_p :]:
        found, expected = filtered_rows(), filtered_rows()
        every_k = torch.full((8,), k, device=DEVICE)
        every_k[::3] = 5
        every_p = torch.full((8,), p, device=DEVICE, dtype=torch.float64)
        every_p[1::3] = 0.77
        arguments = every_k if use_k else None, max(k, 5), every_p if use_p else None
        gpu.keep_top(found, *arguments)
        keep_top(expected, *arguments)
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), (k, p)
        assert found[6].isnan().all(), "nothing possible passes"
        kept_sizes.update((~found[:6].isneginf()).sum(1).tolist())
    assert len(kept_sizes) > 5


def test_the_whole_mass_keeps_all_that_is_possible() -> None:
    logits = filtered_rows()
    gpu.keep_top(logits, None, 0, torch.ones(8, device=DEVICE, dtype=torch.float64))
    # Row 0 holds tokens of less than the last bit of a float64, and row 6 is NaN.
    possible = [1, 2, 3, 4, 5, 7]
    assert torch.equal(logits[possible], filtered_rows()[possible])
