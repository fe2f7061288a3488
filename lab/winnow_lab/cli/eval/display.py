"""The progress of an evaluation on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from winnow.cli.screen.progress import Meter, open_progress

if TYPE_CHECKING:
    from winnow_lab.evaluate.runner import EvaluationProgress


@contextmanager
def show_evaluation(mode: str) -> "Iterator[Callable[[EvaluationProgress], None]]":
    """Yield the function to call after each step, which shows the progress when it is time.

    `mode` is one of `progress.MODES`.
    """
    with open_progress(mode, sys.stderr) as progress:
        meter = Meter()

        def show(now: "EvaluationProgress") -> None:
            if progress.due():
                progress.show(meter.snapshot(now.done, now.total, 0, now.stats, now.cell))

        yield show
