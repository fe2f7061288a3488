"""The Python face of the CPU kernels (`native/`): the only module that imports the extension or maps torch's dtypes.

Where Winnow was installed without a compiler the extension is missing, and of this module only `is_installed` and
`native_kernels` can be used: other modules ask one of them before they import what needs the extension's types.

`WINNOW_ISA` names the instruction set to use, one of `instruction_sets()`; without it the fastest that the processor
runs is taken. `amx_emulated` is slow and for tests: AMX's tile registers on processors without them. For weights
in blocks a name may be followed by one of `block_instruction_sets()`, as in `WINNOW_ISA=avx2,avx2_vnni`; without it the
fastest of them is taken beside the fastest instruction set, and a set that is named computes them by itself.
"""

import os
import sys
import warnings
from functools import cache

# One OpenMP runtime for both: torch brings its own, and must be in the process before the kernels ask for one.
import torch

from winnow.errors import ConfigError

try:
    from winnow._native import *  # noqa: F403  # all that the extension has
    from winnow._native import DType, Format, Kernels, block_instruction_sets, instruction_sets
except ImportError as error:
    _missing: ImportError | None = error
    DTYPES: "dict[torch.dtype, DType]" = {}
    FORMATS: "dict[str, Format]" = {}
else:
    _missing = None
    DTYPES = {torch.float32: DType.f32, torch.bfloat16: DType.bf16, torch.float16: DType.f16}
    """The number formats that the kernels compute with."""
    FORMATS = {form.name: form for form in Format}
    """How a key or a value may be stored for the kernels to read it, by the names of `winnow.cache.formats`."""

ISA_VARIABLE = "WINNOW_ISA"


def is_installed() -> bool:
    return _missing is None


def extension_identity() -> tuple[int, int]:
    """Return size and time of the extension's file: another build may order weights otherwise."""
    stat = os.stat(str(sys.modules[Kernels.__module__].__file__))
    return stat.st_size, stat.st_mtime_ns


@cache
def native_kernels() -> "Kernels | None":
    """Return the kernels, or None, with one warning, where Winnow was installed without a compiler. Raises ConfigError:
    WINNOW_ISA names an instruction set that this processor or this build does not have."""
    if _missing is not None:
        warnings.warn(
            f"Winnow's CPU kernels are not in this installation ({_missing}); plain torch computes instead, several "
            "times slower. They are built by `pip install` where there is a C++17 compiler with OpenMP, such as g++.",
            stacklevel=2,
        )
        return None
    name, block_name = _isa()
    try:
        return Kernels(name, block_name)
    except ValueError as error:
        raise ConfigError(f"{ISA_VARIABLE}: {error}") from None


def _isa() -> tuple[str, str]:
    fastest = f"{instruction_sets()[-1]},{block_instruction_sets()[-1]}"
    name, _, block_name = (os.environ.get(ISA_VARIABLE) or fastest).partition(",")
    return name, block_name


def instruction_set() -> str | None:
    """Return the name of the instruction set that is used; None: the kernels are not installed."""
    return _isa()[0] if is_installed() else None


def native_dtype(dtype: torch.dtype) -> "DType":
    """Return the kernels' name of a dtype. Raises TypeError: they do not compute with it."""
    found = DTYPES.get(dtype)
    if found is None:
        raise TypeError(f"the CPU kernels compute with {', '.join(map(str, DTYPES))}, got {dtype}")
    return found
