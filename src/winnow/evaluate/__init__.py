"""Measuring what evicting KVs costs in accuracy: tasks, metrics and the runs that use them."""
