"""What is expected of a first token follows how late others came."""

from types import SimpleNamespace
from typing import Any

import pytest

from winnow.engine.scheduling.first_token import FirstTokens
from winnow.outputs import RequestMetrics


def sequence(name: str, prompt: int) -> Any:
    request = SimpleNamespace(request_id=name, max_tokens=1, metrics=RequestMetrics(0.0))
    return SimpleNamespace(
        prompt_len=prompt, kv=SimpleNamespace(num_computed=0), num_output_tokens=0, request=request, forks=()
    )


class Running(list[Any]):
    mean_answer = None


def test_requests_behind_late_ones_are_expected_later() -> None:
    """A prompt takes 10 ms a token; once first tokens come three times as late, the wait before one's own counts so."""
    memory = SimpleNamespace(
        num_fitting=lambda waiting, running: len(waiting), recompute_seconds=lambda tokens: tokens / 100
    )
    waiting, running = [sequence("a", 200), sequence("b", 400)], Running()
    expectation = FirstTokens(memory, waiting, running)  # type: ignore[arg-type]
    assert [expectation.seconds(name) for name in "ab"] == [2, 6]
    running.append(waiting.pop(0))
    running[0].request.metrics = RequestMetrics(0.0, first_token_time=6.0)
    running[0].kv.num_computed = 200
    waiting.append(sequence("c", 100))
    expectation.note_step(0.0)
    assert expectation.seconds("c") == pytest.approx(4 * 3 + 1)
    waiting.clear()
    waiting.append(sequence("d", 2000))
    assert expectation.seconds("d") == pytest.approx(20), "alone it is refused for its own length only"
    for name in "efghijklmnop":  # in time again
        running.clear()
        waiting[:] = [sequence(name, 100)]
        expectation.seconds(name)
        running.append(waiting.pop())
        running[0].request.metrics = RequestMetrics(0.0, first_token_time=1.0)
        running[0].kv.num_computed = 100
        expectation.note_step(0.0)
    waiting[:] = [sequence("q", 100), sequence("r", 100)]
    assert 2 < expectation.seconds("r") < 2.7
