"""Import every module of the installed package; only libraries of extras may be missing."""

import importlib
import pkgutil
import sys

import winnow
from winnow.native import instruction_sets

EXTRAS = {
    *("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "python_multipart", "llguidance"),
    *("lm_eval", "rouge", "gguf", "accelerate", "matplotlib", "triton"),
}


def main() -> None:
    if not winnow.__file__.startswith(sys.prefix):
        raise SystemExit(f"{winnow.__file__} is not the installed package")
    if not instruction_sets():
        raise SystemExit("the wheel has no kernels")
    count, without = 0, set()
    for found in pkgutil.walk_packages(winnow.__path__, "winnow.", onerror=_fail):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
            count += 1
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in EXTRAS:
                raise
            without.add(missing)
    print(f"{count} modules imported; not installed: {', '.join(sorted(without)) or 'nothing'}")


def _fail(name: str) -> None:
    error = sys.exc_info()[1]
    if not (isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in EXTRAS):
        raise SystemExit(f"{name} cannot be imported: {error}")


if __name__ == "__main__":
    main()
