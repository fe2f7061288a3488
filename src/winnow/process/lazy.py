"""Lazy exports: a package imports a module when one of its names is first used.

torch and transformers take seconds to import; `winnow run --help` and a mistyped flag do not need them.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, homes: Mapping[str, str], absent: Callable[[str], str | None] = lambda name: None
) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562); `homes` maps each exported name to its module. `absent` says what the
    package has in place of another's name; None: nothing is known of it."""

    def find(name: str) -> Any:
        if name not in homes:
            instead = absent(name)
            if instead is not None:
                raise ImportError(f"{package} has no {name!r}: {instead}", name=package)
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while large libraries are imported: collections that find none take a tenth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
