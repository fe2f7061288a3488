"""Import every module of an installed package; only libraries of extras may be missing."""

import importlib
import pkgutil
import sys

from winnow.errors import WinnowError
from winnow.process.native import instruction_sets

EXTRAS = {
    *("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "python_multipart", "llguidance"),
    *("lm_eval", "rouge", "gguf", "accelerate", "matplotlib", "triton"),
}


def main() -> None:
    package = importlib.import_module(sys.argv[1])
    if not str(package.__file__).startswith(sys.prefix):
        raise SystemExit(f"{package.__file__} is not the installed package")
    if not instruction_sets():
        raise SystemExit("the wheel has no kernels")
    count, without = 0, set()
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=_fail):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
            count += 1
        except (ModuleNotFoundError, WinnowError) as error:
            if (missing := _missing(error)) not in EXTRAS:
                raise
            without.add(missing)
    print(f"{count} modules imported; not installed: {', '.join(sorted(without)) or 'nothing'}")


def _missing(error: BaseException | None) -> str:
    """Return the library without which a module cannot be imported, in Python's words or in Winnow's."""
    if isinstance(error, ModuleNotFoundError):
        return (error.name or "").partition(".")[0]
    return str(error).partition(" is not installed")[0]


def _fail(name: str) -> None:
    error = sys.exc_info()[1]
    if _missing(error) not in EXTRAS:
        raise SystemExit(f"{name} cannot be imported: {error}")


if __name__ == "__main__":
    main()
