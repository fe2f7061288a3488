"""The directory of a packed model."""

from pathlib import Path

DESCRIPTION = "winnow.json"
"""All that is no tensor; written last, so that its presence says that the directory is whole."""
PACKED = "packed.safetensors"
"""Packed weights, each at an address that suits the kernels."""
OTHERS = "others.safetensors"
"""Norms and biases, and an embedding that the head does not share."""


def is_packed(directory: Path) -> bool:
    """Whether a directory holds a packed model."""
    return (directory / DESCRIPTION).is_file()
