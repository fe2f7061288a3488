"""`winnow doctor`: what a report of a fault needs."""

import argparse
import os
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires

from winnow.process import native
from winnow.process.resources import available_cpus, host_memory
from winnow.report.provenance import Machine, commit
from winnow.values.units import format_bytes
from winnow.version import __version__

DESCRIPTION = """\
Print what a report of a fault needs: versions, the machine, kernels, caches and settings of the environment.
Values of variables whose names speak of a key, a token, a password or a proxy are left out.
"""
_VARIABLES = re.compile(
    r"(WINNOW|HF|HUGGING_?FACE|OMP|KMP|MKL|CUDA|TORCH|TRITON|XDG_CACHE)_|(HTTPS?|NO)_PROXY$", re.I
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|PROXY", re.I)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION


def execute(namespace: argparse.Namespace) -> int:
    for name, value in _facts():
        print(f"{name + ':':14} {value}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    machine, memory = Machine.here("auto"), host_memory()
    yield "winnow", f"{__version__}, commit {commit() or 'unknown'}"
    yield "python", f"{machine.python_version}, {machine.system}"
    yield "processor", f"{machine.cpu}, {available_cpus()} usable, {machine.threads} threads"
    if memory is not None:
        yield "memory", f"{format_bytes(memory.limit)}, {format_bytes(memory.free)} free"
    yield "accelerator", machine.accelerator or "none"
    if native.is_installed():
        from winnow.models.load.packed.cache import cache_directory, list_cache  # which needs kernels

        sizes = [each.nbytes for each in list_cache()]
        yield "kernels", ", ".join(map(str, native.instruction_sets()))
        yield "model-cache", f"{cache_directory()}, {len(sizes)} models, {format_bytes(sum(sizes))}"
    else:
        yield "kernels", "not installed: plain torch computes"
    yield "packages", ", ".join(_packages())
    for name in sorted(filter(_VARIABLES.match, os.environ)):
        yield name, "(set)" if _SECRET.search(name) else os.environ[name]


def _packages() -> Iterator[str]:
    """Yield what Winnow and its extras require, but those of developers, with the versions that are here."""
    try:
        needed = [each for each in requires("winnow-llm") or () if '"dev"' not in each.replace("'", '"')]
    except PackageNotFoundError:  # a source tree
        needed = ["torch", "transformers", "tokenizers", "huggingface-hub"]
    for name in sorted({re.split(r"[^\w.-]", each, maxsplit=1)[0].lower() for each in needed}):
        try:
            yield f"{name} {distribution(name).version}"
        except PackageNotFoundError:
            continue
