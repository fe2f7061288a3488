"""Tensors in large pages are tensors like any other; memory that is not there is refused."""

import gc
import mmap
from pathlib import Path

import pytest
import torch

from winnow import LLM
from winnow.cache.memory import empty_in_large_pages
from winnow.errors import ConfigError
from winnow.process.resources import HostMemory

_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def test_holds_what_is_written() -> None:
    parts = []
    for shape in ((3, 5), (0, 16, 8), (1000, 16, 64), (70_001, 16)):
        for dtype in (torch.bfloat16, torch.int32):
            tensor = empty_in_large_pages(shape, dtype)
            assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
            expected = torch.arange(tensor.numel()).view(shape).to(dtype)
            tensor.copy_(expected)
            parts.append((tensor[:1], expected[:1]))
            del tensor
    gc.collect()  # a view alone keeps the memory
    for part, expected in parts:
        assert torch.equal(part, expected), part.shape


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            inside = start <= address < end
        elif inside and name == "VmFlags:":
            return rest.split()
    return []


def test_asks_for_large_pages() -> None:
    tensor = empty_in_large_pages((4 * 2**20,), torch.float32)
    flags = flags_of(tensor.data_ptr())
    assert flags or not Path("/proc/self/smaps").exists()
    assert ("hg" in flags) == _LARGE_PAGES.exists()


def test_does_without_where_the_kernel_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # no such advice: the kernel refuses it
    tensor = empty_in_large_pages((4 * 2**20,), torch.float32)
    assert float(tensor.fill_(2.0).sum()) == 8 * 2**20


@pytest.mark.parametrize(
    ("memory", "kv_memory", "named"),
    [
        (None, "100TiB", ["100.0 TiB"]),
        (HostMemory(2**30, 2**29), "2GiB", ["1.0 GiB", "512.0 MiB", "2.0 GiB"]),
        (HostMemory(2**30, 2**23), "16MiB", ["1.0 GiB", "8.0 MiB", "16.0 MiB"]),
    ],
)
def test_what_the_machine_lacks_is_refused(
    engine_name: str,
    memory: HostMemory | None,
    kv_memory: str,
    named: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if memory is not None:
        monkeypatch.setattr("winnow.cache.memory.host_memory", lambda: memory)
    with pytest.raises(ConfigError, match="kv_memory must fit the memory of cpu") as refusal:
        LLM(kv_memory=kv_memory, engine=engine_name)
    assert all(text in str(refusal.value) for text in named)
