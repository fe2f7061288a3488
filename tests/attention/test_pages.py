"""Pages chosen by summaries of their keys, against loops."""

import pytest
import torch

from winnow.attention.pages import choose_pages, page_bounds, softmax_within

SIZE, PAGES = 4, 5
GENERATOR = torch.Generator().manual_seed(1)
Q = torch.randn(2, 3, 2, 2, 8, generator=GENERATOR)
K = torch.randn(2, 3, SIZE * PAGES, 8, generator=GENERATOR)


@pytest.mark.parametrize("means", [False, True])
def test_bounds(means: bool) -> None:
    valid = torch.arange(SIZE * PAGES) < torch.tensor([[13, 20, 4], [1, 0, 7]])[..., None]
    k = K.masked_fill(~valid[..., None], torch.nan)  # what a row never wrote may be anything
    bounds = page_bounds(Q, k, valid, SIZE, means=means)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in bounds.shape)).tolist():
        g, h, _, _, page = place
        keys = [K[g, h, i] for i in range(page * SIZE, (page + 1) * SIZE) if valid[g, h, i]]
        q = Q[tuple(place[:4])]
        if not keys:
            assert bounds[tuple(place)] == -torch.inf
        elif means:
            assert bounds[tuple(place)] == pytest.approx(float(q @ torch.stack(keys).mean(0)), abs=1e-5)
        else:
            low, high = torch.stack(keys).amin(0), torch.stack(keys).amax(0)
            said = sum(max(float(x * a), float(x * b)) for x, a, b in zip(q, low, high, strict=True))
            assert bounds[tuple(place)] == pytest.approx(said, abs=1e-4)
            assert bounds[tuple(place)] >= max(float(q @ key) for key in keys) - 1e-5


def test_the_own_page_and_the_best() -> None:
    bounds = torch.tensor([5.0, 1.0, 4.0, 0.0, 9.0]).expand(1, 1, 1, 2, PAGES)
    last = torch.tensor([13, 6])  # the KV that each query sees last, in pages 3 and 1
    visible = (torch.arange(SIZE * PAGES) <= last[:, None])[None, None]
    chosen = choose_pages(bounds, visible, SIZE, 2)[0, 0, 0]
    assert chosen[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 12, 13]
    assert chosen[1].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert choose_pages(bounds, visible, SIZE, 99)[0, 0, 0].equal(visible[0, 0])


def test_the_softmax_of_a_part() -> None:
    logits, sink = torch.randn(1, 1, 1, 1, 9, generator=GENERATOR), torch.tensor(0.7)
    chosen = torch.arange(9) % 2 == 0
    for with_sink in (False, True):
        more = sink.expand(1, 1, 1, 1, 1) if with_sink else logits[..., :0]
        p = torch.cat([logits, more], dim=-1).softmax(-1)[..., :9]
        part = torch.cat([logits.masked_fill(~chosen, -torch.inf), more], dim=-1).softmax(-1)[..., :9]
        torch.testing.assert_close(softmax_within(p, chosen), part)
