"""The one face of the extension."""

import pytest
import torch

pytest.importorskip("winnow._native", reason="built without a compiler")
from winnow import native

pytestmark = pytest.mark.cpu


def test_all_that_the_face_names_is_there() -> None:
    assert native.is_installed()
    assert [name for name in native.__all__ if not hasattr(native, name)] == []


def test_dtypes() -> None:
    assert native.native_dtype(torch.bfloat16) == native.DType.bf16
    assert len(native.DTYPES) == len(list(native.DType))
    with pytest.raises(TypeError, match=r"compute with torch.float32, .*, got torch.int8"):
        native.native_dtype(torch.int8)
