"""The kernel that finds the most probable token, against the plain form: every number format and instruction set."""

import pytest
import torch
from torch import Tensor

_native = pytest.importorskip("winnow._native")
from winnow.sampling.filters import open_argmax  # noqa: E402
from winnow.sampling.rows import clean_rows  # noqa: E402

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=_native.instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = _native.Kernels(request.param)
    monkeypatch.setattr("winnow.sampling.filters.native_kernels", lambda: kernels)


def plain(logits: Tensor) -> Tensor:
    return clean_rows(logits).argmax(1)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
class TestArgmax:
    @pytest.mark.parametrize("size", [1, 3, 16, 17, 64, 97, 1000, 70001])
    def test_random_rows_with_many_ties(self, dtype: torch.dtype, size: int) -> None:
        logits = torch.randn(9, size, generator=torch.Generator().manual_seed(size))
        argmax = open_argmax(torch.device("cpu"))
        for rows in (logits, logits.round(), logits[:, :1].expand(9, size).clone()):
            rows = rows.to(dtype)
            assert torch.equal(argmax(rows), plain(rows))

    def test_what_is_no_number(self, dtype: torch.dtype) -> None:
        rows = torch.full((8, 40), -INF)
        rows[1] = NAN
        rows[2, 20:] = NAN
        rows[2, 39] = -3.0
        rows[3, 7] = rows[3, 30] = INF
        rows[4, 39] = INF
        rows[5, ::2] = NAN
        rows[5, 1::2] = -5.0
        rows[6, 0] = NAN
        rows = rows.to(dtype)
        assert open_argmax(torch.device("cpu"))(rows).tolist() == [0, 0, 39, 7, 39, 1, 0, 0]

    def test_rows_that_lie_apart(self, dtype: torch.dtype) -> None:
        wide = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        argmax = open_argmax(torch.device("cpu"))
        assert torch.equal(argmax(wide[:, 3:50]), plain(wide[:, 3:50]))
        assert torch.equal(argmax(wide.T), plain(wide.T))
