"""Factors of the step-time model, fitted to what `winnow bench throughput` measured.

Which steps a run takes does not depend on how long they take, since all its requests are there from the start. So the
run is simulated, its work summed up, and the factors follow from linear equations: one each for the run's seconds, for
those to the median first token, and for those of the median step that decodes alone. What the runs do not tell stays
near the defaults.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnow.config import EngineConfig
from winnow.engine.requests.new_request import NewRequest
from winnow.errors import ConfigError
from winnow.sampling import SamplingParams
from winnow_lab.bench.workload import Workload
from winnow_lab.plan.deployment import Deployment
from winnow_lab.plan.hardware import Hardware
from winnow_lab.plan.models import find_model
from winnow_lab.plan.simulated_engine import EngineSetup
from winnow_lab.plan.step_time import PARTS, Factors, StepWork, usual_factors

_PRIOR = 1e-6
"""Weight of the defaults beside one measurement: where that tells nothing they stay."""


@dataclass(frozen=True)
class Measured:
    """A run of `winnow bench throughput`.

    Attributes:
        seconds: of the whole run; as the others the least of its passes.
        first_token_seconds: the median over requests of those until the first token.
        decode_step_seconds: of the median step without tokens of prompts; None: not measured.
    """

    source: str
    deployment: Deployment
    setup: EngineSetup
    workload: Workload
    seconds: float
    first_token_seconds: float
    decode_step_seconds: float | None = None

    @property
    def times(self) -> tuple[float | None, float | None, float | None]:
        """Measured times, in the order of `RunWork.parts`."""
        return self.seconds, self.first_token_seconds, self.decode_step_seconds


@dataclass(frozen=True)
class RunWork:
    """Work of a run: all of it, to the median first token, and its median decode step.

    Attributes:
        decode: None: each of its steps computes tokens of prompts.
    """

    whole: StepWork
    first: StepWork
    decode: StepWork | None

    @property
    def parts(self) -> tuple[StepWork, StepWork, StepWork | None]:
        """Parts of the work, in the order of `Measured.times`."""
        return self.whole, self.first, self.decode


@dataclass(frozen=True)
class Calibration:
    """Fitted factors, and how well they fit.

    Attributes:
        errors: of each run, as `run_errors` has them.
    """

    factors: Factors
    errors: tuple[tuple[str, tuple[float | None, ...]], ...]


def calibrate(paths: Sequence[Path], hardware: Hardware) -> Calibration:
    """Fit the factors to measured runs on this hardware.

    Raises:
        ConfigError: a file is no report of `winnow bench throughput`, or names a model that is not here.
    """
    runs = [read_run(path, hardware) for path in paths]
    works = [work_of(run) for run in runs]
    rows, seconds = [], []
    for run, computed in zip(runs, works, strict=True):
        for work, value in zip(computed.parts, run.times, strict=True):
            if work is not None and value is not None:
                rows.append([run.deployment.times.ideal(work)[part] for part in PARTS])
                seconds.append(value)
    factors = fit(np.array(rows), np.array(seconds), usual_factors(hardware))
    errors = (run_errors(run, work, factors) for run, work in zip(runs, works, strict=True))
    return Calibration(factors, tuple(zip((run.source for run in runs), errors, strict=True)))


def run_errors(run: Measured, computed: RunWork, factors: Factors) -> tuple[float | None, ...]:
    """Return predicted over measured seconds less 1: of the run, to its median first token, of a median decode step."""
    times = run.deployment.times.with_factors(factors)
    return tuple(
        None if work is None or value is None else times.seconds(work) / value - 1
        for work, value in zip(computed.parts, run.times, strict=True)
    )


def fit(
    rows: NDArray[np.float64], seconds: NDArray[np.float64], prior: Factors, weight: float = _PRIOR
) -> Factors:
    """Return factors of at least 0 with the least squared relative errors, drawn to the prior's where rows do not tell.

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
    for chosen in _subsets(len(before)):
        solved = np.zeros(len(before))
        if chosen:
            solved[chosen] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
        error = float(((matrix @ solved - target) ** 2).sum())
        if solved.min() >= 0 and error < best:
            best, found = error, solved
    return Factors(**dict(zip(PARTS, (found * scale).tolist(), strict=True)))


def _subsets(count: int) -> list[list[int]]:
    return [list(chosen) for size in range(count + 1) for chosen in combinations(range(count), size)]


def read_run(path: Path, hardware: Hardware) -> Measured:
    """Return a report of `winnow bench throughput --json`.

    Raises:
        ConfigError: it is none, or names a model that is not here.
    """
    try:
        report: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        options = dict(report["engine"])
        workload = Workload(**report["workload"])
        # The least of all passes: whatever else runs on a machine only adds to it.
        seconds, first = (
            min(float(each[name]) for each in report["passes"]) for name in ("seconds", "first_token_seconds")
        )
        steps = [float(each["decode_step_seconds"]) for each in report["passes"] if _has_decode(each)]
        kv_memory = int(report["kv_bytes_budget"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"calibrate must name JSON files of `winnow bench throughput`, got {str(path)!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    config = EngineConfig.from_options(options | {"kv_memory": kv_memory})
    model = find_model(config.model.model or _demo_model())
    deployment = Deployment(
        model,
        hardware,
        dtype=config.model.dtype,
        cache=config.cache,
        eviction=config.eviction,
        scheduler=config.scheduler,
    )
    setup = EngineSetup.of(deployment, kv_memory, config.model.max_model_len, prefix_caching=False)
    return Measured(str(path), deployment, setup, workload, seconds, first, min(steps) if steps else None)


def _has_decode(values: Mapping[str, Any]) -> bool:
    return values.get("decode_step_seconds") is not None


def work_of(run: Measured) -> RunWork:
    """Return the work of a run, from its simulation."""
    simulated = run.setup.open(run.deployment)
    engine, workload = simulated.engine, run.workload
    params = SamplingParams(
        temperature=0.0, max_tokens=workload.new_tokens, ignore_eos=True, detokenize=False
    )
    for number in range(workload.requests):
        engine.add(NewRequest(str(number), None, [0] * workload.prompt_tokens, params))
    firsts: list[StepWork] = []
    decoding: list[StepWork] = []
    started: set[str] = set()
    while engine.has_unfinished:
        before = simulated.executor.total
        new = {output.request_id for output in engine.step()} - started
        started |= new
        step = simulated.executor.total.minus(before)
        if step.tokens == step.samples == step.sequences > 0:
            decoding.append(step)
        firsts += [simulated.executor.total] * len(new)
    decoding.sort(key=simulated.executor.seconds)
    median = decoding[len(decoding) // 2] if decoding else None
    # The median of an even number is the mean of the two in the middle.
    low, high = firsts[(len(firsts) - 1) // 2], firsts[len(firsts) // 2]
    return RunWork(simulated.executor.total, low.plus(high).times(0.5), median)


def _demo_model() -> Path:
    from winnow.models.load.hub import DEMO_MODEL

    return DEMO_MODEL
