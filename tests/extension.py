"""The compiled extension in tests: what needs it is skipped where Winnow was built without a compiler."""

import pytest

from winnow.attention import AttentionBackend
from winnow.process import native

needs_extension = pytest.mark.skipif(not native.is_installed(), reason="needs the kernels: make setup")
ISAS: list[str] = native.instruction_sets() if native.is_installed() else []
"""Instruction sets of this processor and build."""


def native_backend(isa: str) -> AttentionBackend:
    """The backend of one of `ISAS`."""
    from winnow.attention.native import NativeBackend  # needs the extension's types

    return NativeBackend(native.Kernels(isa))
