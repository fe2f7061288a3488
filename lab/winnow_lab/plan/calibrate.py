"""Factors of the step-time model, fitted to what `winnow bench throughput` measured.

Which steps a run takes does not depend on how long they take, since all its requests are there from the start. So the
run is simulated, its work summed up, and the factors follow from linear equations: one each for the run's seconds, for
those to the median first token, and for those of the median step that decodes alone. What the runs do not tell stays
near the defaults.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from winnow.config import EngineConfig
from winnow.engine.requests.new_request import NewRequest
from winnow.errors import ConfigError
from winnow.models.load.hub import DEMO_MODEL
from winnow.sampling import SamplingParams
from winnow_lab.bench.presets import Workload
from winnow_lab.plan.deployment import Deployment
from winnow_lab.plan.hardware import Hardware
from winnow_lab.plan.models import find_model
from winnow_lab.plan.simulated_engine import EngineSetup
from winnow_lab.plan.step_time import PARTS, Factors, StepWork, usual_factors

_PRIOR = 1e-6
"""Weight of the defaults beside one measurement: where that tells nothing they stay."""


class Times(NamedTuple):
    """Seconds of a run: whole, to the median first token, of the median step that decodes alone; None: not measured."""

    whole: float | None
    first: float | None
    decode: float | None


class RunWork(NamedTuple):
    """Work of a run, in the order of `Times`; decode None: each of its steps computes tokens of prompts."""

    whole: StepWork
    first: StepWork
    decode: StepWork | None


@dataclass(frozen=True)
class Measured:
    """A run of `winnow bench throughput`, with the least times of its passes."""

    source: str
    deployment: Deployment
    setup: EngineSetup
    workload: Workload
    times: Times


class Calibration(NamedTuple):
    """Fitted factors, and how well they fit: errors of each run, as `run_errors` has them."""

    factors: Factors
    errors: dict[str, tuple[float | None, ...]]


def calibrate(paths: Sequence[Path], hardware: Hardware) -> Calibration:
    runs = [read_run(path, hardware) for path in paths]
    works = [work_of(run) for run in runs]
    rows, seconds = [], []
    for run, computed in zip(runs, works, strict=True):
        for work, value in zip(computed, run.times, strict=True):
            if work is not None and value is not None:
                rows.append([run.deployment.times.ideal(work)[part] for part in PARTS])
                seconds.append(value)
    factors = fit(np.array(rows), np.array(seconds), usual_factors(hardware))
    errors = (run_errors(run, work, factors) for run, work in zip(runs, works, strict=True))
    return Calibration(factors, dict(zip((run.source for run in runs), errors, strict=True)))


def run_errors(run: Measured, computed: RunWork, factors: Factors) -> tuple[float | None, ...]:
    """Predicted over measured seconds less 1, in the order of `Times`."""
    times = replace(run.deployment.times, factors=factors)
    return tuple(
        None if work is None or value is None else times.seconds(work) / value - 1
        for work, value in zip(computed, run.times, strict=True)
    )


def fit(
    rows: NDArray[np.float64], seconds: NDArray[np.float64], prior: Factors, weight: float = _PRIOR
) -> Factors:
    """Factors of at least 0 with the least squared relative errors, drawn to the prior's where rows do not tell.

    Args:
        rows: ideal times by measurement and part of `Factors`, [M, P]; seconds: measured, [M].
        weight: of the prior, whose every factor counts as so much of a measurement.
    """
    before = np.array([getattr(prior, part) for part in PARTS])
    # In units of the prior, and relative to what was measured.
    scale = np.where(before > 0, before, 1.0)
    matrix = np.vstack([rows * scale / seconds[:, None], np.sqrt(weight) * np.eye(len(before))])
    target = np.concatenate([np.ones(len(seconds)), np.sqrt(weight) * before / scale])
    # Few unknowns: the least squares of each set of factors that are not 0, of which the best without a negative one.
    best, found = math.inf, np.ones(len(before))
    subsets = (combinations(range(len(before)), size) for size in range(len(before) + 1))
    for chosen in map(list, chain.from_iterable(subsets)):
        solved = np.zeros(len(before))
        if chosen:
            solved[chosen] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
        error = float(((matrix @ solved - target) ** 2).sum())
        if solved.min() >= 0 and error < best:
            best, found = error, solved
    return Factors(**dict(zip(PARTS, (found * scale).tolist(), strict=True)))


def read_run(path: Path, hardware: Hardware) -> Measured:
    """A report of `winnow bench throughput --json`; raises ConfigError for what is none, or names no model here."""
    try:
        report: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        options = dict(report["engine"])
        workload = Workload(**report["workload"])
        # The least of all passes: whatever else runs on a machine only adds to it.
        passes = report["passes"]
        steps = [float(value) for each in passes if (value := each.get("decode_step_seconds")) is not None]
        names = ("seconds", "first_token_seconds")
        whole, first = (min(float(each[name]) for each in passes) for name in names)
        times = Times(whole, first, min(steps, default=None))
        kv_memory = int(report["kv_bytes_budget"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"calibrate must name JSON files of `winnow bench throughput`, got {str(path)!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    config = EngineConfig.from_options(options | {"kv_memory": kv_memory})
    deployment = Deployment(
        find_model(config.model.model or DEMO_MODEL),
        hardware,
        dtype=config.model.dtype,
        cache=config.cache,
        eviction=config.eviction,
        scheduler=config.scheduler,
    )
    setup = EngineSetup.of(deployment, kv_memory, config.model.max_model_len, prefix_caching=False)
    return Measured(str(path), deployment, setup, workload, times)


def work_of(run: Measured) -> RunWork:
    simulated = run.setup.open(run.deployment)
    engine, executor, workload = simulated.engine, simulated.executor, run.workload
    params = SamplingParams(
        temperature=0.0, max_tokens=workload.new_tokens, ignore_eos=True, detokenize=False
    )
    for number in range(workload.requests):
        engine.add(NewRequest(str(number), None, [0] * workload.prompt_tokens, params))
    firsts: list[StepWork] = []
    decoding: list[StepWork] = []
    started: set[str] = set()
    while engine.has_unfinished:
        before = executor.total
        new = {output.request_id for output in engine.step()} - started
        started |= new
        step = executor.total.minus(before)
        if step.tokens == step.samples == step.sequences > 0:
            decoding.append(step)
        firsts += [executor.total] * len(new)
    decoding.sort(key=executor.seconds)
    median = decoding[len(decoding) // 2] if decoding else None
    # The median of an even number is the mean of the two in the middle.
    low, high = firsts[(len(firsts) - 1) // 2], firsts[len(firsts) // 2]
    return RunWork(executor.total, low.plus(high).times(0.5), median)
