"""Tables, plots and the console."""

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, between neighbours in proportion; NaN of no values."""
    import numpy as np

    return float(np.percentile(values, percent)) if values else float("nan")
