"""What compressing lets expect, from steps as they were measured."""

from collections.abc import Callable
from functools import partial

import pytest

from winnow.engine.memory.swap_costs import Fit
from winnow.outputs import CompressionOutlook


def learned(*steps: tuple[int, float]) -> Callable[[int], float | None]:
    """What steps of so many sequences are expected to take."""
    times = Fit(0.99)
    for n, seconds in steps:
        times.add(1, n, seconds)
    return partial(times.predict, 1)


def test_steps_of_several_sizes_tell_what_a_sequence_adds() -> None:
    seconds = learned((2, 0.014), (8, 0.026), (4, 0.018))  # 10 ms and 2 ms for each sequence
    assert seconds(2) == pytest.approx(0.014)
    assert seconds(32) == pytest.approx(0.074)


def test_steps_that_are_all_alike_are_taken_not_to_grow() -> None:
    seconds = learned(*[(4, 0.02)] * 5)
    assert seconds(1) == seconds(16) == pytest.approx(0.02)
    assert learned()(1) is None


def test_a_step_never_gets_shorter_with_more_sequences_nor_begins_below_zero() -> None:
    assert learned((1, 0.03), (8, 0.02))(16) == pytest.approx(0.025, rel=0.01)
    assert learned((2, 0.01), (8, 0.06))(1) == pytest.approx(0.5 / 68, rel=0.02)


@pytest.mark.parametrize(("gain", "pays"), [(None, True), (1.0, False), (1.019, False), (1.02, True)])
def test_only_what_was_measured_says_that_it_does_not_pay(gain: float | None, pays: bool) -> None:
    assert CompressionOutlook(32, 8, 32, 4.0, gain).pays is pays


def test_an_outlook_reads_as_a_sentence() -> None:
    assert str(CompressionOutlook(32, 8, 30, 4.0, 1.93)) == (
        "8 of 32 requests fit into the KV memory whole; compressed to 4x, 1.9 times the throughput is expected"
    )
    assert str(CompressionOutlook(32, 8, 30, 4.0, None)) == (
        "8 of 32 requests fit into the KV memory whole; compressed to 4x, 30 do"
    )
