"""Imports run downward only, so that each part can be read, and the scheduler run, without those above it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "winnow"
# From the ground up. A part imports itself and what stands on lines before its own; parts on one line do not import
# each other. A part that is listed need not be there yet.
LAYERS = [
    ["errors", "_native", "version"],
    ["process"],
    ["values"],
    ["vllm.names"],
    ["config", "vllm.modules"],
    ["media"],
    ["cache", "sampling"],
    ["attention", "outputs", "prompt"],
    ["storage"],
    ["eviction", "openai", "vllm.metrics"],
    ["anthropic"],
    ["report", "models"],
    ["engine"],
    ["executor"],
    ["engine_client"],
    ["llm"],
    ["batch"],
    ["server"],
    ["cli"],
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
# They export and start what is above everything.
FACE = ("__init__", "__main__", "vllm.__init__")
FACE_OF_ALL = "winnow"


def modules() -> dict[str, Path]:
    """Every module of Winnow by its dotted name; a package stands under its own."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Modules and names of Winnow that a file imports, wherever in the file it does so, also for types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports by a relative name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.startswith("winnow."))


def part(name: str) -> str:
    """The part that a module, or a name in it, belongs to. vLLM's words stand low, its engines on top of everything."""
    _, first, *rest = name.split(".")
    return ".".join((first, *rest[:1])) if first == "vllm" else first


def part_of(path: Path) -> str:
    return part(f"winnow.{'.'.join(path.relative_to(SOURCE).with_suffix('').parts)}")


def imported_parts(path: Path) -> set[str]:
    return {part(name) for name in imports(path)}


FLOORS = ("model", "bind", "fast", "load")
"""Floors of `models`, from the ground up: what is said of a model; its layers over the paged cache; faster forms of
these; from a name to all of it in memory."""


@pytest.mark.parametrize("floor", FLOORS)
def test_floors_of_models_import_downward(floor: str) -> None:
    above = {f"winnow.models.{each}" for each in FLOORS[FLOORS.index(floor) + 1 :]}
    paths = [path for name, path in MODULES.items() if name.startswith(f"winnow.models.{floor}.")]
    found = {
        (path.name, name)
        for path in paths
        for name in imports(path)
        if ".".join(name.split(".")[:3]) in above
    }
    assert paths and not found


def test_what_is_imported_is_there() -> None:
    """No module is imported by a name that it had before it was moved, wherever in a file the import stands."""
    known = {*MODULES, "winnow._native"}
    for path in MODULES.values():
        missing = [name for name in imports(path) if not known & {name, name.rpartition(".")[0]}]
        assert not missing, path


DOOR = {"room", "swap", "prefixes", "spans", "files", "sessions", "ledger", "_ledger", "_room", "_prefixes"}
"""Parts of `Memory`, which its own methods ask."""
REACHES = 12
"""How often scheduling may ask a part of the memory in place of the memory."""


def test_scheduling_asks_the_memory() -> None:
    found = 0
    for path in (SOURCE / "engine" / "scheduling").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            part = node.value if isinstance(node, ast.Attribute) else None
            found += getattr(part, "attr", getattr(part, "id", None)) in DOOR
    assert found <= REACHES, "ask the memory"


@pytest.mark.parametrize("own", sorted({part_of(path) for path in MODULES.values()} - set(FACE)))
def test_imports_run_downward(own: str) -> None:
    assert own in RANK, f"tests/test_imports.py does not say where {own} stands"
    for path in MODULES.values():
        if part_of(path) == own:
            above = {name for name in imported_parts(path) - {own} if RANK[name] >= RANK[own]}
            assert not above, f"{path.relative_to(SOURCE)} imports {above}, which do not stand below it"


def test_no_files_import_each_other_in_a_circle() -> None:
    """Also not by way of others, nor for types alone. Packages that export names lazily count as what they import."""
    graph = {
        name: {target for each in imports(path) if (target := owner(each)) not in (name, FACE_OF_ALL)}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*way, name))
            done.add(name)

    for name in sorted(graph):
        if name != FACE_OF_ALL:
            visit(name, ())


def owner(imported: str) -> str:
    """The module that an imported name lives in."""
    while imported not in MODULES:
        imported = imported.rpartition(".")[0]
    return imported


def test_the_engine_knows_no_lab() -> None:
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
        named |= {
            alias.name for each in ast.walk(tree) if isinstance(each, ast.Import) for alias in each.names
        }
        assert not any(str(each).split(".")[0] == "winnow_lab" for each in named), name


def test_the_extension_has_one_face() -> None:
    for name, path in MODULES.items():
        if name != "winnow.process.native":
            assert "_native" not in imported_parts(path), f"{name} imports winnow._native"


def test_the_accounting_knows_no_model() -> None:
    for path in (SOURCE / "cache").rglob("*.py"):
        assert imported_parts(path) <= {"cache", "errors", "process", "values"}, path.name


def test_memory_knows_nothing_of_scheduling() -> None:
    """What lies where is decided without whose turn it is."""
    below = [name for name in MODULES if name.startswith(("winnow.engine.memory.", "winnow.storage."))]
    assert len(below) > 10
    for name in below:
        above = [each for each in imports(MODULES[name]) if each.startswith("winnow.engine.scheduling")]
        assert not above, f"{name} imports {above}"
