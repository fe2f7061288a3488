"""The experiments of papers, on models and machines that are at hand; `python -m benchmarks.papers --help`."""
