"""Kernels are tried at load over KVs as they will be stored."""

from pathlib import Path

import pytest
from architectures import ARCHITECTURES, save
from tests.extension import needs_extension
from torch import Tensor

from winnow import LLM
from winnow.errors import UnsupportedModelError


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8", "int4", "int2", "k=int8,v=int2"])
def test_formats_are_served(tmp_path: Path, kv_cache_dtype: str) -> None:
    save(ARCHITECTURES["gemma3"], tmp_path)
    with LLM(tmp_path, kv_memory="16MiB", kv_cache_dtype=kv_cache_dtype):
        pass


@needs_extension
def test_a_kernel_that_is_wrong_for_a_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from winnow.attention.native import KernelStep

    save(ARCHITECTURES["gpt2"], tmp_path)  # whose layers call the backend, and not one kernel for all
    write = KernelStep.write

    def wrong(self: KernelStep, layer: int, k: Tensor, v: Tensor) -> None:
        coded = self.cache.pool.layout.codecs[0].name == "int8"
        write(self, layer, k, v.flip(-1).contiguous() if coded else v)

    monkeypatch.setattr(KernelStep, "write", wrong)
    with LLM(tmp_path, kv_memory="4MiB"):
        pass
    refused = pytest.raises(UnsupportedModelError, match=r"kv_cache_dtype: NativeBackend .* stored as int8")
    with refused:
        LLM(tmp_path, kv_memory="4MiB", kv_cache_dtype="int8")
