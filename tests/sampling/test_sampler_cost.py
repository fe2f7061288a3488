"""What a sampling step may cost: memory, transfers, and work for unused features."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_support import make_sampler, random_logits
from torch.utils._python_dispatch import TorchDispatchMode

from winnow.sampling import SamplerOutput, SamplingParams
from winnow.sampling.rows import row_blocks

VOCAB = 12
EOS = (1, 4)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> SamplerOutput:
        sampler = make_sampler(16, 50)
        for slot in range(16):
            extra: dict[str, Any] = {
                "logprobs": slot % 4,
                "repetition_penalty": 1.5,
                "logit_bias": {slot: 5.0},
            }
            sampler.add(slot, SamplingParams(seed=slot, top_p=0.9, **extra), [slot])
        return sampler.sample(random_logits(16, 50), range(16))

    whole = run()
    monkeypatch.setattr("winnow.sampling.rows._BLOCK_ELEMENTS", 150)
    assert list(row_blocks(7, 50)) == [(0, 3), (3, 6), (6, 7)]
    assert list(row_blocks(2, 1000)) == [(0, 1), (1, 2)]
    assert run() == whole


def test_penalty_tables_come_with_need_and_go_with_it() -> None:
    sampler = make_sampler(32, 1000)
    plain, penalised = SamplingParams(temperature=0), SamplingParams(temperature=0, presence_penalty=1)
    for slot in range(10):
        sampler.add(slot, plain, [1])
    assert sampler.nbytes == 0
    sampler.add(10, penalised, [1])
    assert 0 < sampler.nbytes <= 4 * 5 * 1000
    for slot in range(11, 20):
        sampler.add(slot, penalised, [1], [slot])
    assert sampler.nbytes <= 16 * 5 * 1000
    logits = torch.zeros(10, 1000)
    logits[:, 5] = 1.5
    for row, slot in enumerate(range(10, 20)):
        logits[row, slot] = 2.0  # seen, so 1.0 after the penalty, but not by slot 10
    assert sampler.sample(logits, range(10, 20)).token_ids == [10] + [5] * 9
    for slot in range(20):
        sampler.remove(slot)
    assert sampler.nbytes == 0


def test_features_cost_only_the_rows_that_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting sees the one row that needs it; with top-k nothing is sorted at all."""
    sorted_shapes = []
    sort = torch.Tensor.sort

    def spy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sorted_shapes.append(tuple(tensor.shape))
        return sort(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "sort", spy)
    sampler = make_sampler(4, 12)
    extras: list[dict[str, Any]] = [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 5}]
    for slot, extra in enumerate(extras):
        sampler.add(slot, SamplingParams(**extra), [])
    sampler.sample(random_logits(2, 12), [0, 1])
    sampler.sample(random_logits(3, 12), [0, 1, 3])
    assert sorted_shapes == []
    sampler.sample(random_logits(4, 12), [0, 1, 2, 3])
    assert sorted_shapes == [(1, 12)]


class TransferSpy(TorchDispatchMode):
    """Refuses every operation for which a GPU would have to report to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in {
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "_unique2",
        }
        return func(*args, **(kwargs or {}))


def test_a_step_takes_one_transfer_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make_sampler(5, VOCAB, EOS)
    everything: dict[str, Any] = {
        "top_k": 3,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "logit_bias": {1: 1.0},
    }
    extras: list[dict[str, Any]] = [{}, {"temperature": 0}, {"logprobs": 3}, everything, {"top_p": 0.5}]
    for slot, extra in enumerate(extras):
        sampler.add(slot, SamplingParams(min_tokens=slot, **extra), [1])
    transfers = []

    def spy(direction: str, transfer: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        def transferred(each: Any) -> torch.Tensor:
            transfers.append(direction)
            return transfer(each)

        return transferred

    monkeypatch.setattr(torch.Tensor, "cpu", spy("host", torch.Tensor.cpu))
    monkeypatch.setattr(torch, "from_numpy", spy("device", torch.from_numpy))
    monkeypatch.setattr(torch, "tensor", None)
    with TransferSpy():
        sampler.sample(random_logits(5, VOCAB), range(5))
    assert transfers == ["device", "host"]
