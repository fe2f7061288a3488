"""What compressing lets expect, from steps as they were measured."""

import pytest

from winnow.engine.plan import PlannedSequence, StepPlan
from winnow.engine.scheduling.payoff import DecodeTimes
from winnow.outputs import CompressionOutlook


def decoding(n: int) -> StepPlan:
    return StepPlan(tuple(PlannedSequence(slot, 100, [5]) for slot in range(n)))


def learned(*steps: tuple[int, float]) -> DecodeTimes:
    times = DecodeTimes()
    for n, seconds in steps:
        times.record(decoding(n), seconds)
    return times


def test_steps_of_several_sizes_tell_what_a_sequence_adds() -> None:
    times = learned((2, 0.014), (8, 0.026), (4, 0.018))  # 10 ms and 2 ms for each sequence
    assert times.seconds(2) == pytest.approx(0.014)
    assert times.seconds(32) == pytest.approx(0.074)


def test_steps_that_are_all_alike_are_taken_not_to_grow() -> None:
    times = learned(*[(4, 0.02)] * 5)
    assert times.seconds(1) == times.seconds(16) == pytest.approx(0.02)


def test_a_step_never_gets_shorter_with_more_sequences() -> None:
    assert learned((1, 0.03), (8, 0.02)).seconds(16) == pytest.approx(0.025, rel=0.01)


def test_steps_of_prompts_say_nothing() -> None:
    times = DecodeTimes()
    assert times.seconds(1) is None
    times.record(StepPlan((PlannedSequence(0, 0, [5] * 7),)), 3.0)
    assert times.seconds(1) is None


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
