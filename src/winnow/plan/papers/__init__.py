"""The papers' own machines, predicted: printed numbers beside ours, with the error and what causes it.

Ratios within a paper are compared where its software (eager transformers, vLLM of 2024) sets the absolute speed.
"""

from collections.abc import Callable, Mapping

from winnow.plan.papers.batch_max import batch_max
from winnow.plan.papers.baton import baton
from winnow.plan.papers.kcache import kcache
from winnow.plan.papers.kv_compress import kv_compress
from winnow.report.tables import TextTable

PAPERS: Mapping[str, Callable[[], TextTable]] = {
    "kv-compress": kv_compress,
    "batch-max": batch_max,
    "baton": baton,
    "kcache": kcache,
}
"""By name."""
