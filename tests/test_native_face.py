"""The one face of the extension."""

import ast
from pathlib import Path

import pytest
import torch

pytest.importorskip("winnow._native")
from winnow.process import native

pytestmark = pytest.mark.cpu


def test_all_that_the_stub_names_is_there() -> None:
    assert native.is_installed()
    stub = ast.parse((Path(native.__file__).parents[1] / "_native.pyi").read_text(encoding="utf-8"))
    names = [each.name for each in stub.body if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    names += [ast.unparse(each.targets[0]) for each in stub.body if isinstance(each, ast.Assign)]
    assert len(names) > 30 and [name for name in names if not hasattr(native, name)] == []


def test_dtypes() -> None:
    assert native.native_dtype(torch.bfloat16) == native.DType.bf16
    assert len(native.DTYPES) == len(list(native.DType))
    with pytest.raises(TypeError, match=r"compute with torch.float32, .*, got torch.int8"):
        native.native_dtype(torch.int8)
