"""Pages chosen by summaries of their keys, against loops."""

import pytest
import torch
from tests.attention.paged import paged_batch
from tests.attention.test_split import COUNTS, SPEC, attend

from winnow.attention.pages import choose_pages, page_bounds

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


@pytest.mark.parametrize("select", ["pages", "means", "pages,keys", "means,keys"])
def test_attention_over_pages(select: str) -> None:
    """Enough pages are exact; fewer read whole pages, at most as many as N has, and the one of the query."""
    exact = paged_batch(4, COUNTS, value_tier=f"host:N=1000,select={select}")
    torch.testing.assert_close(attend(exact), attend(paged_batch(4, COUNTS)), atol=1e-5, rtol=1e-5)
    batch = paged_batch(4, COUNTS, value_tier=f"host:N=8,select={select}")
    out = attend(batch)
    traffic = batch.cache.pool.of_layer(-1).traffic
    assert traffic.rows_selected <= 8 * traffic.head_queries
    pool, tables, spans = batch.cache.pool, batch.cache.tables, batch.spans
    for sequence, slot in enumerate(spans.slots[: spans.num_decodes].tolist()):
        for query_head in range(4):
            head = query_head // 2
            length = int(tables.lengths[slot, batch.layer, head])
            table = tables.lookup(torch.tensor([slot]), batch.layer, -(-length // 4))
            slots = pool.numbers.slots_of(table[0, head].long())[:length]
            kind, q = pool.of_layer(-1), batch.q[sequence, query_head] * SPEC.scale
            k, v = kind.keys(slots), kind.values(slots)
            bounds = [
                float("inf")
                if page[-1] == length - 1
                else float(q @ k[page].mean(0))
                if "means" in select
                else float(torch.maximum(q * k[page].amin(0), q * k[page].amax(0)).sum())
                for page in torch.arange(length).split(4)
            ]
            pages = sorted(range(len(bounds)), key=lambda i: -bounds[i])[:2]
            kvs = torch.cat([torch.arange(length).split(4)[i] for i in pages])
            torch.testing.assert_close(
                out[sequence, query_head], (k[kvs] @ q).softmax(0) @ v[kvs], atol=1e-5, rtol=1e-4
            )
