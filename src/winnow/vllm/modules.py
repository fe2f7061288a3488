"""Finder of modules of vLLM's names, so that `from winnow.sampling_params import SamplingParams` finds what is here."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from winnow.process.lazy import lazy_exports
from winnow.vllm import names as vllm_names

_PACKAGE = "winnow."


def absent(name: str) -> str | None:
    """Return what Winnow has in place of a name of the package `vllm`; None: nothing is known of it."""
    return vllm_names.CLASSES[name].note if name in vllm_names.CLASSES else None


class VllmModules(MetaPathFinder, Loader):
    """Finder and loader of `vllm_names.MODULES`, whose names are imported when they are first used."""

    @classmethod
    def install(cls) -> None:
        """Let imports find these modules, after all files."""
        if not any(isinstance(each, cls) for each in sys.meta_path):
            sys.meta_path.append(cls())

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = name.startswith(_PACKAGE) and name.removeprefix(_PACKAGE) in vllm_names.MODULES
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        homes = vllm_names.MODULES[module.__name__.removeprefix(_PACKAGE)]
        module.__getattr__ = lazy_exports(module.__name__, homes, absent)  # type: ignore[method-assign]
        module.__dir__ = lambda: sorted(homes)  # type: ignore[method-assign]
