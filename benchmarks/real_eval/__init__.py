"""How much of a real model's accuracy each policy keeps: `python -m benchmarks.real_eval`."""
