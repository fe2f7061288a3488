"""LongBench's English subsets."""

from winnow_lab.evaluate.tasks.longbench.task import (
    LONGBENCH,
    LONGBENCH_KV_COMPRESS,
    LONGBENCH_KV_COMPRESS_70B,
    LongBenchTask,
)

__all__ = ["LONGBENCH", "LONGBENCH_KV_COMPRESS", "LONGBENCH_KV_COMPRESS_70B", "LongBenchTask"]
