"""Logprobs: of raw logits, with ranks, for those who asked."""

import math

import pytest
import torch
from sampling_support import make_sampler, random_logits

from winnow.sampling import SamplingParams, prompt_logprobs


def test_logprobs_are_of_raw_logits_with_the_sampled_token_first() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    sampler = make_sampler(1, 4)
    sampler.add(
        0, SamplingParams(temperature=0, logprobs=2, logit_bias={1: -50, 2: -50}, presence_penalty=1), []
    )
    output = sampler.sample(logits, [0])
    raw = logits.log_softmax(1)[0].tolist()
    assert output.token_ids == [3]
    report = output.logprobs[0]
    assert report is not None and list(report) == [3, 1, 2]
    assert {token: entry.rank for token, entry in report.items()} == {3: 3, 1: 1, 2: 2}
    assert [entry.logprob for entry in report.values()] == pytest.approx([raw[3], raw[1], raw[2]])


def test_each_row_gets_as_many_as_it_asked_for() -> None:
    logits = random_logits(5, 30)
    sampler = make_sampler(5, 30)
    asked = [None, 0, 3, 64, None]
    for slot, count in enumerate(asked):
        sampler.add(slot, SamplingParams(temperature=0, logprobs=count), [])
    output = sampler.sample(logits, [4, 3, 2, 1, 0])
    assert output.logprobs[0] is None and output.logprobs[4] is None
    assert [len(report) for report in output.logprobs if report is not None] == [30, 3, 1]
    for row, report in enumerate(output.logprobs[1:4], start=1):
        assert report is not None
        expected = logits[row].log_softmax(0)
        order = expected.sort(descending=True).indices.tolist()
        assert list(report) == order[: len(report)]
        for token, entry in report.items():
            assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-6)
            assert entry.rank == order.index(token) + 1 and entry.decoded_token is None


def test_equals_share_a_rank() -> None:
    reports = prompt_logprobs(torch.tensor([[2.0, 3.0, 2.0, 2.0, 1.0]]), [3], top=5)
    assert {token: entry.rank for token, entry in reports[0].items()} == {1: 1, 0: 2, 2: 2, 3: 2, 4: 5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [0, 1, 5, 64])
def test_prompt_logprobs_in_blocks(top: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows in blocks of three, against one log-softmax of everything."""
    logits = random_logits(7, 20).to(dtype)
    following = [3, 19, 0, 7, 7, 1, 12]
    sizes = []
    softmax = torch.Tensor.log_softmax

    def spy(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(len(tensor))
        return softmax(tensor, dim)

    expected = softmax(logits.float(), 1)
    monkeypatch.setattr("winnow.sampling.rows._BLOCK_ELEMENTS", 60)
    monkeypatch.setattr(torch.Tensor, "log_softmax", spy)
    reports = prompt_logprobs(logits, following, top)
    assert sizes == [3, 3, 1]
    assert len(reports) == 7
    for row, (token, report) in enumerate(zip(following, reports, strict=True)):
        first = next(iter(report))
        assert first == token
        assert report[token].logprob == pytest.approx(float(expected[row, token]), abs=1e-6)
        assert report[token].rank == int((expected[row] > expected[row, token]).sum()) + 1
        best = expected[row].topk(min(top, 20)).values.tolist()
        listed = sorted((entry.logprob for entry in report.values()), reverse=True)
        assert listed[: len(best)] == pytest.approx(best, abs=1e-6)
        assert len(report) in (len(best), len(best) + 1)


def test_no_prompt_no_logprobs() -> None:
    assert prompt_logprobs(torch.zeros(0, 5), [], top=3) == []


def test_logprobs_of_rows_that_are_not_finite_are_no_numbers() -> None:
    """A single token ruled out leaves the others theirs."""
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, 0.0, -inf], [0.0, nan, 0.0], [0.0, inf, 0.0], [-inf] * 3])
    sound, *unsound = prompt_logprobs(logits, [2, 0, 0, 0], top=1)
    assert sound[2].logprob == -inf and sound[0].logprob == pytest.approx(math.log(0.5))
    assert all(math.isnan(entry.logprob) for report in unsound for entry in report.values())
