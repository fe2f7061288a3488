"""Who may look at what: the pool's memory belongs to the cache and the backends, and backends to their interface."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import winnow

SOURCE = Path(winnow.__file__).parent
# What the pool holds as its codec stores it, and the accumulators.
MEMORY = {"k", "v", "kv", "accumulators", "storage", "fields", "words"}
# What imports no torch when it is imported: the ledger, which is host arithmetic, stands on it.
GROUND = {
    "winnow.values.checks",
    "winnow.errors",
    "winnow.values.kv_dtype",
    "winnow.values.units",
    "winnow.values.value_tier",
}
TORCH_FREE = [
    *(f"cache/{name}.py" for name in ("cache_size", "codec", "formats", "layout", "row_groups")),
    "values/kv_dtype.py",
    "values/value_tier.py",
]


def modules(word: str) -> Iterator[tuple[str, ast.Module]]:
    """Those in which it stands: to parse all takes seconds."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if word in text:
            yield path.relative_to(SOURCE).as_posix(), ast.parse(text)


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def memory_touched(tree: ast.Module) -> list[int]:
    """Lines that ask a pool for its memory."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in MEMORY
        and name_of(node.value).strip("_") in ("pool", "kv_pool")
    ]


def test_only_the_cache_and_the_backends_touch_the_pools_memory() -> None:
    touched = {name: memory_touched(tree) for name, tree in modules("pool")}
    outside = {
        name: lines
        for name, lines in touched.items()
        if lines and not name.startswith(("cache/", "attention/"))
    }
    assert not outside, "ask the pool through its methods"
    assert touched["attention/native.py"], "the test sees such lines"


def test_no_backend_is_told_by_its_class() -> None:
    distinguished = [
        (name, node.lineno)
        for name, tree in modules("Backend")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and name_of(node.func) in ("isinstance", "issubclass", "type")
        and any(
            name_of(part).endswith("Backend")
            for argument in node.args
            for part in ast.walk(argument)
            if isinstance(part, ast.expr)
        )
    ]
    assert not distinguished, "add to AttentionBackend what the caller needs to know"


@pytest.mark.parametrize("name", TORCH_FREE)
def test_host_arithmetic_imports_no_torch(name: str) -> None:
    tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
    # Neither under TYPE_CHECKING, nor within functions, which import when something is encoded or decoded.
    runtime = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {
        module
        for node in runtime
        for part in ast.walk(node)
        if isinstance(part, ast.Import | ast.ImportFrom)
        for module in (
            [alias.name for alias in part.names] if isinstance(part, ast.Import) else [part.module or ""]
        )
    }
    own = {module for module in imported if module.startswith("winnow.")}
    assert "torch" not in {module.partition(".")[0] for module in imported}
    free = {f"winnow.{each.removesuffix('.py').replace('/', '.')}" for each in TORCH_FREE}
    assert own <= free | GROUND, "none of which imports torch"
