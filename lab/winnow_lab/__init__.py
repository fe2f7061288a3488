"""Benchmarks, evaluation tasks, planner and studies of Winnow; `python -m winnow_lab` lists the studies."""
