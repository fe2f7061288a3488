"""Clients of the OpenAI API, unmodified, against `winnow serve`: `python -m benchmarks.conformance --help`."""
