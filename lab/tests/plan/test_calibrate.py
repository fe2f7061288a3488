"""Calibration: what runs measured, the model of time predicts, also of runs that it has not seen."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from tests.tiny_llama import save_tiny_llama

from winnow.config import SchedulerConfig
from winnow.errors import ConfigError
from winnow_lab.bench.presets import Workload
from winnow_lab.plan.calibrate import calibrate, fit, read_run, run_errors, work_of
from winnow_lab.plan.hardware import HARDWARE
from winnow_lab.plan.step_time import PARTS, Factors

TRUE = Factors(
    compute=1.2,
    attention=2.0,
    weights=1.1,
    kv=1.5,
    link=1.0,
    layer=40e-6,
    sequence=20e-6,
    step=300e-6,
    ranked=3.0,
)
CARD = HARDWARE["desktop-ddr5"]
TIMES = ("seconds", "first_token_seconds", "decode_step_seconds")


def report(
    path: Path, model: Path, requests: int, prompt: int, new: int, seconds: tuple[float | None, ...]
) -> Path:
    """As `winnow bench throughput --json` writes it."""
    workload = {"requests": requests, "prompt_tokens": prompt, "new_tokens": new, "prompt_seed": 0}
    values = {
        "engine": {"model": str(model), "max_num_seqs": 16, "dtype": "float32"},
        "workload": workload,
        "kv_bytes_budget": 4 * 2**20,
        "passes": [dict(zip(TIMES, seconds, strict=True))],
    }
    path.write_text(json.dumps(values))
    return path


def measured(path: Path, model: Path, requests: int, prompt: int, new: int) -> Path:
    """A run on a machine whose factors are TRUE."""
    run = read_run(report(path, model, requests, prompt, new, (1.0, 1.0, None)), CARD)
    times = replace(run.deployment, factors=TRUE).times
    seconds = tuple(None if work is None else times.seconds(work) for work in work_of(run))
    return report(path, model, requests, prompt, new, seconds)


def test_calibration_predicts_shapes_that_it_has_not_seen(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", 0)
    shapes = [(1, 16, 64), (8, 400, 8), (16, 128, 64), (2, 900, 30)]
    runs = [measured(tmp_path / f"{i}.json", model, *shape) for i, shape in enumerate(shapes)]
    found = calibrate(runs, CARD)
    assert all(abs(error) < 0.05 for errors in found.errors.values() for error in errors if error is not None)
    for shape in ((4, 200, 100), (16, 500, 10), (1, 1000, 1), (12, 64, 200)):
        run = read_run(measured(tmp_path / "held.json", model, *shape), CARD)
        errors = run_errors(run, work_of(run), found.factors)
        assert all(abs(error) < 0.10 for error in errors if error is not None)


def test_work_of_a_run_counts_each_token(tmp_path: Path) -> None:
    run = read_run(measured(tmp_path / "r.json", save_tiny_llama(tmp_path / "m", 0), 6, 100, 20), CARD)
    found = work_of(run)
    whole, first = found.whole, found.first
    assert whole.samples == 6 * 20
    assert whole.tokens == 6 * (100 + 19)
    assert 0 < first.tokens < whole.tokens
    assert found.decode is not None and found.decode.samples == found.decode.sequences == 6
    assert run.workload == Workload(6, 100, 20)
    assert run.deployment.scheduler == SchedulerConfig(16)


def test_without_measurements_the_factors_stay() -> None:
    rows = np.zeros((1, len(PARTS)))
    assert asdict(fit(rows, np.ones(1), Factors())) == pytest.approx(asdict(Factors()))


def test_factors_are_not_negative() -> None:
    rows = np.eye(len(PARTS))
    assert min(asdict(fit(rows, np.full(len(PARTS), 1e-9), Factors())).values()) >= 0


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="calibrate"):
        calibrate([tmp_path / "x.json"], CARD)
