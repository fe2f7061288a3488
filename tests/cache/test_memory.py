"""Tensors in large pages are tensors like any other."""

import gc

import pytest
import torch

from winnow.cache.memory import empty_in_large_pages


@pytest.mark.parametrize("shape", [(3, 5), (0, 16, 8), (1000, 16, 64), (70_001, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32], ids=str)
def test_holds_what_is_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty_in_large_pages(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    expected = torch.arange(tensor.numel()).view(shape).to(dtype)
    tensor.copy_(expected)
    part = tensor[:1]
    del tensor
    gc.collect()  # a view alone keeps the memory
    assert torch.equal(part, expected[:1])
