"""Charts of plans and simulations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from winnow_lab.plan.plan_tables import Plan
from winnow_lab.report.plots import Axis, Line, Panel, line_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BATCH = 1024


def plan_figure(plans: Sequence[Plan]) -> "Figure":
    """Return tokens per second against the batch, and the largest batch against the context.

    Raises:
        WinnowError: matplotlib is not installed.
    """
    rates, batches = [], []
    for plan in plans:
        deployment, request = plan.deployment, plan.request
        label = f"{deployment.gpus} x {deployment.hardware.name}, {plan.policy}"
        sizes = [2**power for power in range(11) if 2**power <= min(max(plan.largest_batch, 1), _MOST_BATCH)]
        rates.append(
            Line(label, sizes, [deployment.performance(request, size).output_rate for size in sizes])
        )
        lengths = [2**power for power in range(10, 18)]
        answer = min(request.new_tokens, 512)
        largest = [deployment.largest_batch(type(request)(length - answer, answer)) for length in lengths]
        batches.append(Line(label, lengths, largest))
    return line_chart(
        [
            Panel("throughput", Axis("batch", "log2"), Axis("new tokens/s", low=0), rates),
            Panel("what fits", Axis("tokens", "log2"), Axis("largest batch", low=0), batches),
        ],
        plans[0].deployment.model.name,
    )
