"""Imports run downward only, so that each part can be read, and the scheduler run, without those above it."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "winnow"
# From the ground up; a part may import those before it.
LAYERS = [
    "errors",
    "_native",
    "native",
    "lazy",
    "units",
    "json_values",
    "resources",
    "threads",
    "fork",
    "figures",
    "text_table",
    "config",
    "cache",
    "attention",
    "eviction",
    "options",
    "sampling",
    "fingerprint",
    "journal",
    "outputs",
    "chat",
    "inspection_page",
    "inspection",
    "models",
    "engine",
    "padded",
    "llm",
    "evaluate",
    "fitting",
    "bench",
    "cli",
]


def imported_parts(path: Path) -> set[str]:
    """The parts of Winnow that a file imports, wherever in the file it does so."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            if node.module == "winnow":
                names |= {f"winnow.{alias.name}" for alias in node.names if alias.name in LAYERS}
    return {name.split(".")[1] for name in names if name.startswith("winnow.")}


def test_imports_run_downward() -> None:
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):  # they export and start what is above everything
            continue
        above = {name for name in imported_parts(path) if LAYERS.index(name) > LAYERS.index(part)}
        assert not above, f"{path.relative_to(SOURCE)} imports {above}, which stand above it"


def test_the_accounting_knows_no_model() -> None:
    for path in (SOURCE / "cache").glob("*.py"):
        assert imported_parts(path) <= {"cache", "errors", "resources", "units"}, path.name
