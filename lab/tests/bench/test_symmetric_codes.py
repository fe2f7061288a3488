"""`winnow_lab.answers.symmetric_codes`: what symmetric codes lose at equal bytes."""

import torch

from winnow.models import DEMO_MODEL
from winnow_lab.answers.symmetric_codes import Options, asymmetric, error, study, symmetric


def test_symmetric_codes_lose_more_at_equal_bytes() -> None:
    """A scale for 32 channels takes what a scale and a min for 64 do."""
    x = torch.randn(3, 50, 64, generator=torch.Generator().manual_seed(0))
    for bits in (4, 3, 2):
        assert (
            error(x, asymmetric(x, bits, 32))
            < error(x, asymmetric(x, bits, 64))
            < error(x, symmetric(x, bits, 32))
        )
    assert error(x, symmetric(x, 8, 64)) < 0.01


def test_codes_of_a_models_own_keys_and_values() -> None:
    result = study(Options(model=str(DEMO_MODEL), tokens=128))
    rows = {(row["bits"], row["codes"]): row for row in result.numbers["rows"]}
    assert len(rows) == 9
    for side in ("k", "v"):
        assert (
            0
            < rows[4, "asymmetric, 32"][side]
            < rows[3, "asymmetric, 32"][side]
            < rows[2, "symmetric, 32"][side]
        )
