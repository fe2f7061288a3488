"""Clients of the OpenAI API, unmodified, against `winnow serve`: `python -m winnow_lab.conformance --help`."""
