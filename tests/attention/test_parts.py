"""A batch that several backends share: observed sequences go to one, the others to another."""

import pytest
import torch
from tests.attention.paged import paged_batch

from winnow.attention import (
    AttentionObserver,
    AttentionSpec,
    BackendStep,
    PagedCache,
    ReferenceBackend,
    Spans,
    Term,
)
from winnow.attention.parts import ComposedBackend


class Noted(ReferenceBackend):
    """Backend that notes which batches it is to attend over."""

    def __init__(self) -> None:
        self.observed: list[tuple[AttentionObserver | None, ...]] = []

    def prepare(self, cache: PagedCache, spans: Spans) -> BackendStep:
        self.observed.append(spans.observe)
        return super().prepare(cache, spans)


@pytest.mark.parametrize("watched", [[], [1, 3], [0, 1, 2, 3]], ids=["none", "some", "all"])
def test_a_composed_backend_gives_each_its_sequences(watched: list[int]) -> None:
    observer = AttentionObserver((Term.SQUARED,))
    observe = [observer if i in watched else None for i in range(4)]
    results, plain, observing = [], Noted(), Noted()
    for backend in (ReferenceBackend(), ComposedBackend(plain, observing)):
        batch = paged_batch(3, [1, 1, 9, 20], longest=60, observe=observe)
        step = backend.prepare(batch.cache, batch.spans)
        step.write(batch.layer, batch.k, batch.v)
        out = step.attend(batch.layer, batch.q, AttentionSpec(0.3))
        results.append((out, batch.cache.pool.accumulators.clone()))
    (expected, sums), (found, own_sums) = results
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own_sums, sums)
    assert observing.observed == ([tuple(observe[i] for i in watched)] if watched else [])
    assert (observe.count(None) > 0) == any(None in seen for seen in plain.observed)
    assert len(watched) in (0, 4) or plain.observed[-1] == (None,) * (4 - len(watched))
