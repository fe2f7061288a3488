"""Tests marked `cpu` see no GPU, nor do processes that they start: with one here the rest of the suite runs on it."""

import os

import pytest
import torch


@pytest.fixture(scope="module")
def seen_by_fixtures() -> bool:
    return torch.cuda.is_available()


@pytest.mark.cpu
def test_a_gpu_is_hidden(seen_by_fixtures: bool) -> None:
    assert not seen_by_fixtures and not torch.cuda.is_available()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_it_is_seen_again() -> None:
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != ""
