"""The experiments of papers, on models and machines that are at hand; `python -m winnow_lab.papers --help`."""
