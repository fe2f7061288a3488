"""Measurements of a GPU within six minutes: its limits, kernels, whole models and peers."""
