"""Winnow as a worker of NVIDIA Dynamo: `python -m winnow_dynamo`."""
