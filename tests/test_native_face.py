"""The one face of the extension."""

import ast
from pathlib import Path

import pytest
import torch

pytest.importorskip("winnow._native", reason="built without a compiler")
from winnow import native

SOURCE = Path(native.__file__).parent


def imports_the_extension(path: Path) -> bool:
    """Whether a file imports `winnow._native`, wherever in the file it does so."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = node.module if isinstance(node, ast.ImportFrom) else None
        if "winnow._native" in (module, *names) or (module == "winnow" and "_native" in names):
            return True
    return False


def test_one_module_imports_the_extension() -> None:
    found = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if imports_the_extension(path)]
    assert found == ["native.py"]


def test_all_that_the_face_names_is_there() -> None:
    assert native.is_installed()
    assert [name for name in native.__all__ if not hasattr(native, name)] == []


def test_dtypes() -> None:
    assert native.native_dtype(torch.bfloat16) == native.DType.bf16
    assert len(native.DTYPES) == len(list(native.DType))
    with pytest.raises(TypeError, match=r"compute with torch.float32, .*, got torch.int8"):
        native.native_dtype(torch.int8)
