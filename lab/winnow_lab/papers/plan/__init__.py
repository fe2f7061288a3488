"""The papers' own machines: printed numbers beside a planner that is fitted to some of them, with error and cause.

Ratios within a paper are compared where its software (eager transformers, vLLM of 2024) sets the absolute speed.
"""

from collections.abc import Callable, Mapping

from winnow_lab.papers.plan.batch_max import batch_max
from winnow_lab.papers.plan.baton import baton
from winnow_lab.papers.plan.kcache import kcache, kcache_attention
from winnow_lab.papers.plan.kv_compress import kv_compress
from winnow_lab.report.tables import TextTable

PAPERS: Mapping[str, Callable[[], TextTable]] = {
    "kv-compress": kv_compress,
    "batch-max": batch_max,
    "baton": baton,
    "kcache": kcache,
    "kcache-attention": kcache_attention,
}
"""By name."""
