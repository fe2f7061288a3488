"""KV memory of a GPU where its size was left out, with a card that only says how much it has."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from winnow.config import EngineConfig
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.executor.build import with_device_memory
from winnow.models.model.damage import loading

GIB = 2**30


@dataclass
class Model:
    """A model of which only the sizes matter."""

    device: torch.device
    config: LlamaConfig
    dtype: torch.dtype = torch.bfloat16
    vocab_size: int = 1000

    @property
    def model(self) -> "Model":
        return self


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (64 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def kv_memory(device: str = "cuda", **options: Any) -> int:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 512} | options
    model: Any = Model(torch.device(device), LlamaConfig(hidden_size=1024, intermediate_size=4096))
    return with_device_memory(EngineConfig.from_options(options), model).cache.kv_memory


def test_what_the_part_leaves_beside_use_and_a_step(card: None) -> None:
    step = 512 * 4096 * 4 * 2 + ((4 + 512) * 4096 * 4 + 4 * 1000) * 2 + 4 * 1000 * 3 * 4
    assert kv_memory() == int(80 * GIB * 0.9) - 16 * GIB - step
    assert kv_memory(gpu_memory_utilization=0.5) == 24 * GIB - step
    assert kv_memory(gpu_memory_utilization=None) == kv_memory(gpu_memory_utilization=0.9)


def test_a_size_that_is_given_alone_counts(card: None) -> None:
    assert kv_memory(kv_memory="1GiB") == kv_memory(kv_memory="1GiB", gpu_memory_utilization=0.5) == GIB


def test_nothing_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    assert kv_memory("cpu") == 512 * 2**20 and not caplog.text
    assert kv_memory("cpu", gpu_memory_utilization=0.5) == 512 * 2**20
    assert "gpu_memory_utilization=0.5 has no effect on a CPU, where kv_memory is 512.0 MiB" in caplog.text


def test_nothing_left(card: None) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization 0.2 of 80.0 GiB .*: 16.0 GiB are in use"):
        kv_memory(gpu_memory_utilization=0.2)


@pytest.mark.parametrize("part", [0, 1.1, True, "much"])
def test_parts_out_of_range(part: Any) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be above 0 and at most 1"):
        kv_memory("cpu", gpu_memory_utilization=part)


def test_a_model_that_does_not_fit_says_what_was_asked_and_what_is_free(card: None, tmp_path: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught, loading(tmp_path):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total ...")
    assert "asked for 2.50 GiB more, and 64.0 GiB of 80.0 GiB are free" in str(caught.value)
    assert "cannot load" not in str(caught.value)
