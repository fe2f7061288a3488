"""Tables and plots, and two numbers that they show."""

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, between neighbours in proportion; NaN of no values."""
    import numpy as np

    return float(np.percentile(values, percent)) if values else float("nan")


def standard_error(values: Sequence[float]) -> float | None:
    """That of the mean; None of fewer than two values."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
