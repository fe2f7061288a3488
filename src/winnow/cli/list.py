"""`winnow list`: the models that are on this machine."""

import argparse
from pathlib import Path

from winnow.models.fast.packed.description import is_packed
from winnow.models.load.hub import DEMO_MODEL, fetched_repositories
from winnow.values.units import format_bytes

DESCRIPTION = """\
List models that `--model` takes and that are here: in a directory, in the Hugging Face Hub's cache, and
the demo model, with what each takes on disk.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow list [DIR]"
    parser.description = DESCRIPTION
    parser.add_argument(
        "directory", metavar="DIR", type=Path, nargs="?", default=Path("models"), help="of models"
    )


def execute(namespace: argparse.Namespace) -> int:
    rows = [("(left out)", _size(DEMO_MODEL), "the demo model")]
    for path in sorted(namespace.directory.glob("*")):
        if path.suffix == ".gguf" and path.is_file():
            rows.append((str(path), path.stat().st_size, "GGUF file"))
        elif is_packed(path) or (path / "config.json").is_file():
            rows.append((str(path), _size(path), "packed" if is_packed(path) else "directory"))
    rows += [(name, size, "from the Hub") for name, size in fetched_repositories()]
    width = max(len(name) for name, _, _ in rows)
    for name, size, kind in rows:
        print(f"{name:{width}}  {format_bytes(size):>10}  {kind}")
    return 0


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
