"""The gate of drafts under a virtual clock: it finds what pays, and loses next to nothing by looking."""

from collections.abc import Callable
from random import Random

import pytest

from winnow.engine.scheduling.draft_gate import Chance, DraftGate, upper_bound

K = 4


def memory_bound(sequences: int, drafts: int) -> float:
    """Seconds of a step that reads weights as long as few tokens are computed: drafts lose at 9 sequences."""
    tokens = sequences + drafts
    return 0.1 + 0.2 * tokens if sequences >= 9 else 1.0 + 0.01 * tokens


class Decoding:
    """Steps of sequences whose drafts are accepted with a chance each, as the scheduler asks for them.

    Args:
        price: of a draft, in steps, of a model that computes each answer of 24 tokens before, as long as 8 drafts.
    """

    def __init__(self, seconds: Callable[[int, int], float], noise: float = 0.0, price: float = 0.0) -> None:
        self.gate, self.random = DraftGate(price=price), Random(1)
        self.price, self.known = price, -1
        self.time, self.noise = seconds, noise
        self.chances: list[Chance] = []
        self.seconds = self.tokens = 0.0
        self.drafts: list[int] = []

    def run(self, steps: int, *accepts: float) -> None:
        """Compute steps of a sequence for each chance."""
        n, gate = len(accepts), self.gate
        self.chances = [Chance(0.9) for _ in accepts] if len(self.chances) != n else self.chances
        for _ in range(steps):
            drafts = gate.drafts(n)
            counts = [0] * n
            if drafts:
                counts = gate.allot(n, [K] * n, [chance.expect(0.6) for chance in self.chances])
            tokens = n
            for accept, count, chance in zip(accepts, counts, self.chances, strict=True):
                accepted = 0
                while accepted < count and self.random.random() < accept:
                    accepted += 1
                tokens += accepted
                if count:
                    chance.record(count, accepted)
            seconds = self.time(n, sum(counts))
            if self.price and any(counts):
                answer = int(self.tokens) // (24 * n)
                made = max(counts) + (8 if answer > self.known else 0)
                seconds += made * self.price * self.time(n, 0)
                self.known = answer
            seconds *= 1 + self.noise * self.random.uniform(-1, 1)
            gate.record(n, drafts, sum(counts), tokens, seconds)
            self.seconds += seconds
            self.tokens += tokens
            self.drafts.append(sum(counts))


def test_drafts_end_where_they_lose_and_return_with_a_smaller_batch() -> None:
    run = Decoding(memory_bound)
    run.run(30, *[0.7] * 4)
    assert sum(count >= 4 for count in run.drafts[-10:]) >= 8  # of 4 sequences
    run.run(12, *[0.7] * 12)
    assert run.drafts[-3:] == [0, 0, 0]
    run.run(400, *[0.7] * 12)
    assert sum(map(bool, run.drafts[-400:])) < 50
    run.run(40, *[0.7] * 4)
    assert sum(map(bool, run.drafts[-20:])) >= 17
    [four] = [rates for rates in run.gate.rates() if rates.most_running == 4]
    assert four.used and four.plain and four.drafted and four.drafted > 1.5 * four.plain
    assert not run.gate.rates()[-1].used


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("accept", [0.0, 0.1, 0.7])
@pytest.mark.parametrize(("price", "steps"), [(0.0, 600), (0.1, 400), (0.4, 200)])
@pytest.mark.parametrize("sequences", [1, 4, 9, 16, 40])
def test_never_two_percent_slower_than_without(
    sequences: int, price: float, steps: int, accept: float, noise: float
) -> None:
    run = Decoding(memory_bound, noise, price)
    run.run(steps, *[accept] * sequences)
    plain = memory_bound(sequences, 0) / sequences
    assert run.seconds / run.tokens < plain / 0.98


@pytest.mark.parametrize("sequences", [1, 4, 8])
def test_gains_are_nearly_those_of_the_best_fixed_number(sequences: int) -> None:
    run = Decoding(memory_bound)
    run.run(600, *[0.8] * sequences)
    tokens = [sum(0.8**i for i in range(count + 1)) for count in range(K + 1)]
    best = max(sequences * tokens[k] / memory_bound(sequences, sequences * k) for k in range(K + 1))
    assert run.tokens / run.seconds > 0.94 * best


def test_only_sequences_that_gain_get_drafts() -> None:
    gate = DraftGate()
    for _ in range(3):
        gate.record(4, False, 0, 4, 1.0)
        gate.record(4, True, 4, 8, 1.2)
    assert gate.allot(4, [K, K, K, 1], [0.9, 0.05, 0.9, 0.9])[1] == 0
    assert gate.allot(4, [K, K, K, 1], [0.9, 0.05, 0.9, 0.9])[0] == K


def test_another_number_of_sequences_is_measured_without_drafts_first() -> None:
    run = Decoding(memory_bound)
    run.run(40, 0.9)
    for n in (2, 9):
        run.drafts.clear()
        run.run(30, *[0.9] * n)
        assert run.drafts[:2] == [0, 0]
        assert (sum(map(bool, run.drafts[-10:])) > 5) == (n == 2)


def test_always_all_if_not_adaptive() -> None:
    gate = DraftGate(adaptive=False)
    assert gate.drafts(64) and gate.allot(64, [3, 0, 2], [0.0, 0.0, 0.0]) == [3, 0, 2]


def test_numbers_of_sequences_that_are_measured_together() -> None:
    numbers = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25]
    assert list(map(upper_bound, numbers)) == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 16, 24, 24, 32]
