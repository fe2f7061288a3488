"""The performance model of KCache against its equations, and `winnow plan --value-tier`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from winnow.cli.main import main
from winnow_lab.papers.plan.kcache import attention_costs
from winnow_lab.plan.hardware import HARDWARE
from winnow_lab.plan.models import MODELS
from winnow_lab.plan.value_tier import TierModel, tier_gain

D, HEADS = 4096, 32
LLAMA = TierModel(32, D, HEADS, HEADS, 24.0 * D * D, 256.0, 256.0)
A100 = HARDWARE["A100"]


@pytest.mark.parametrize("top_n", [32, 128])
@pytest.mark.parametrize("batch", [1, 7])
def test_decode_is_equation_3(top_n: int, batch: int) -> None:
    """With 2 bytes an element on its left side: then s / N > 64 for an A100 (equation 4)."""
    for length in (top_n * 60, top_n * 64, top_n * 70):
        fetched = 2 * batch * D * top_n / A100.link
        left = 2 * batch * ((HEADS + D) * (length - top_n)) / A100.bandwidth
        gain = tier_gain(LLAMA, A100, layers=0, top_n=top_n, length=length, batch=batch)
        assert gain.full_seconds - gain.tiered_seconds == pytest.approx(32 * (left - fetched))
        assert gain.pays == (fetched < left) == (length >= gain.pays_from)
    assert gain.pays_from is not None
    assert gain.pays_from / top_n == pytest.approx(2039 / 32 + 1, rel=0.02)


def test_prefill_is_equation_2_with_the_output_projection() -> None:
    ratio = A100.compute / A100.link
    gain = tier_gain(LLAMA, A100, layers=1, top_n=64, length=1, batch=1)
    assert gain.hidden and gain.hidden_from == 1 and ratio < 12 * D + 2  # as the paper says of an A100
    slow = replace(A100, link=A100.link / 8)
    found = tier_gain(LLAMA, slow, layers=1, top_n=64, length=4096, batch=1).hidden_from
    assert 12 * D + 2 * found >= 8 * ratio > 12 * D + 2 * (found - 1)


def test_layers_that_stay_and_a_query_group() -> None:
    model = TierModel.of(MODELS["llama-3-8b"], 256.0, 256.0)
    full, half = (tier_gain(model, A100, layers=n, top_n=64, length=8192) for n in (0, 16))
    assert half.full_seconds - half.tiered_seconds == pytest.approx(
        (full.full_seconds - full.tiered_seconds) / 2
    )
    assert half.moved_bytes == full.moved_bytes / 2 == full.kv_bytes / 4
    # Each of four query heads reads values of its own of each KV head.
    alone = tier_gain(replace(model, query_heads=model.kv_heads), A100, layers=0, top_n=64, length=8192)
    assert full.pays_from > 3 * alone.pays_from
    kept = tier_gain(LLAMA, A100, layers=32, top_n=8, length=10**6)
    assert kept.pays_from is None and kept.full_seconds == kept.tiered_seconds


def test_plan_says_from_where_it_pays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    line = ("plan", "llama-2-7b", "--gpu", "A100,H100", "--context", "4096", "--batch", "1")
    assert main([*line, "--value-tier", "host:L=1,N=32", "--json", str(file)]) == 0
    assert "pays from" in capsys.readouterr().out
    gains = json.loads(file.read_text())["value_tier"]
    assert [gain["pays"] for gain in gains] == [True, True] and gains[0]["pays_from"] < 2200
    assert main([*line, "--value-tier", "host:L=1"]) == 2
    assert "value_tier" in capsys.readouterr().err


@pytest.mark.parametrize("top_n", [None, 128])
def test_operations_a_byte_of_attention_are_table_1(top_n: int | None) -> None:
    """Compare with the printed table, with the values term of the N largest as 1/N (the text prints 1/s)."""
    b, s, d, n = 8, 4096, 4096, 32
    h, rows = d / n, top_n or s
    found = {part: ops / read for part, (ops, read) in attention_costs(b, s, d, n, top_n).items()}
    projection = 1 / (2 / d + 1 / b)
    printed = (projection, 1 / (1 + rows / (s * h) + 1 / s), 1 / (1 + 1 / h + 1 / rows), projection)
    assert list(found.values()) == pytest.approx(printed)
    assert attention_costs(b, s, d, n, top_n)["A"][0] == 2 * b * rows * d
