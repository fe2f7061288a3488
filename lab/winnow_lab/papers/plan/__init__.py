"""The papers' own machines: printed numbers beside a planner that is fitted to some of them, with error and cause.

Ratios within a paper are compared where its software (eager transformers, vLLM of 2024) sets the absolute speed.
"""
