"""The CPU kernels (`native/`), if this installation has them.

`WINNOW_ISA` names the instruction set to use, one of `winnow._native.instruction_sets()`; without it the fastest that
the processor runs is taken. `amx_emulated` is slow and for tests: AMX's tile registers on processors without them.
"""

import os
import warnings
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

# One OpenMP runtime for both: torch brings its own, and must be in the process before the kernels ask for one.
import torch

from winnow.errors import ConfigError

if TYPE_CHECKING:
    from winnow._native import DType, Kernels

ISA_VARIABLE = "WINNOW_ISA"
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def native_module() -> ModuleType | None:
    """The extension, or None where Winnow was installed without a compiler."""
    try:
        return import_module("winnow._native")
    except ImportError:
        return None


@cache
def native_kernels() -> "Kernels | None":
    """The kernels, or None, with one warning, where Winnow was installed without a compiler.

    Raises:
        ConfigError: WINNOW_ISA names an instruction set that this processor or this build does not have.
    """
    try:
        from winnow import _native
    except ImportError as error:
        warnings.warn(
            f"Winnow's CPU kernels are not in this installation ({error}); plain torch computes instead, several times "
            "slower. They are built by `pip install` where there is a C++17 compiler with OpenMP, such as g++.",
            stacklevel=2,
        )
        return None
    name = os.environ.get(ISA_VARIABLE) or _native.instruction_sets()[-1]
    try:
        return _native.Kernels(name)
    except ValueError as error:
        raise ConfigError(f"{ISA_VARIABLE}: {error}") from None


@cache
def native_dtype(dtype: torch.dtype) -> "DType":
    """The kernels' name of a number format.

    Raises:
        TypeError: the kernels do not compute with it.
    """
    from winnow import _native

    if dtype not in _DTYPES:
        raise TypeError(f"the CPU kernels compute with {', '.join(map(str, _DTYPES))}, got {dtype}")
    return getattr(_native.DType, _DTYPES[dtype])
