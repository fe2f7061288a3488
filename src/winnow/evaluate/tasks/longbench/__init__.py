"""LongBench's English subsets."""

from winnow.evaluate.tasks.longbench.task import LONGBENCH, LONGBENCH_KV_COMPRESS, LongBenchTask

__all__ = ["LONGBENCH", "LONGBENCH_KV_COMPRESS", "LongBenchTask"]
