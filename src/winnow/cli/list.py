"""`winnow list`: the models that are on this machine, or the GGUF files of a repository of the Hub."""

import argparse
from pathlib import Path

from winnow.cli.flags.engine import silence_transformers
from winnow.errors import UsageError
from winnow.models.fast.packed.description import is_packed
from winnow.models.load.hub import DEMO_MODEL, cached_files, fetched_repositories, gguf_files, is_repository
from winnow.process.digest import part_names
from winnow.process.resources import directory_bytes, host_memory
from winnow.values.units import format_bytes

DESCRIPTION = """\
List models that `--model` takes and that are here: in a directory, in the Hugging Face Hub's cache, and
the demo model, with what each takes on disk. Of a repository (org/name) its GGUF files, and which this
machine's memory holds: weights, and a GiB for KVs and all else.
"""
# Beside the weights.
_ROOM = 2**30


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow list [DIR | org/name]"
    parser.description = DESCRIPTION
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        nargs="?",
        default=Path("models"),
        help="of models, or org/name",
    )
    parser.add_argument("--revision", metavar="NAME", help="of a repository: a branch, tag or commit")


def execute(namespace: argparse.Namespace) -> int:
    if is_repository(str(namespace.directory)):
        silence_transformers()
        return _show(_of_repository(str(namespace.directory).partition(":")[0], namespace.revision))
    rows = [("demo", directory_bytes(DEMO_MODEL), "the demo model")]
    for path in sorted(namespace.directory.glob("*")):
        if path.suffix == ".gguf" and path.is_file():
            rows.append((str(path), path.stat().st_size, "GGUF file"))
        elif is_packed(path) or (path / "config.json").is_file():
            rows.append((str(path), directory_bytes(path), "packed" if is_packed(path) else "directory"))
    rows += [(name, size, "from the Hub") for name, size in fetched_repositories()]
    return _show(rows)


def _of_repository(repository: str, revision: str | None) -> list[tuple[str, int, str]]:
    here, rows = cached_files(repository, revision), []
    for file, size in gguf_files(repository, revision).items():
        said = fitting(size)
        whole = all(part in here for part in part_names(file))
        rows.append((f"{repository}:{file}", size, f"{said}, is here" if whole else said))
    if not rows:
        raise UsageError(f"{repository} has no GGUF files; `winnow pull {repository}` fetches safetensors")
    return rows


def fitting(size: int) -> str:
    """Return whether weights of `size` bytes, and what lies beside them, fit into this machine's memory; empty: not
    known."""
    memory = host_memory()
    if memory is None:
        return ""
    fits = size + _ROOM <= memory.limit
    return f"{'fits' if fits else 'exceeds'} {format_bytes(memory.limit)} of memory"


def _show(rows: list[tuple[str, int, str]]) -> int:
    width = max(len(name) for name, _, _ in rows)
    for name, size, kind in rows:
        print(f"{name:{width}}  {format_bytes(size):>10}  {kind}")
    return 0
