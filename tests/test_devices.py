"""Tensors are made on a device that the code names: torch's default is the user's to choose."""

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

SOURCE = Path(__file__).parent.parent / "src" / "winnow"
PARTS = ("eviction", "executor", "fitting", "models", "plan", "sampling")
CONSTRUCTORS = {f"torch.{function.__name__}" for function in _device_constructors()}


def names_none(node: ast.AST) -> bool:
    """Whether a node makes a tensor without saying where."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in CONSTRUCTORS:
        return False
    return all(keyword.arg not in ("device", None) for keyword in node.keywords)


def test_tensors_are_made_on_a_named_device() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"
        for part in PARTS
        for path in sorted((SOURCE / part).rglob("*.py"))
        for node in filter(names_none, ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    ]
    assert not found, "no device= in\n" + "\n".join(found)
