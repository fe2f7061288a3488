"""Choice of the KVs to read by summaries of blocks of keys, where keys themselves are not read (Quest, arXiv
2406.10774).

A page is a block of a row. Its summary is the least and the largest of each channel of its keys, which bounds the
product of a query with any of them: `sum_c max(q_c low_c, q_c high_c)`; or their mean. Pages with the largest bounds
are read, keys and values, and the softmax goes over these. The page of a query's own KV is always one of them.
"""

import torch
from torch import Tensor


def page_bounds(q: Tensor, k: Tensor, valid: Tensor, size: int, *, means: bool = False) -> Tensor:
    """Return what the keys of each page may give at most; with `means` what they give on average.

    Args:
        q: float32 [G, H, g, n, d]; k: float32 [G, H, N, d], N in whole pages of `size`; valid: bool [G, H, N].

    Returns:
        float32 [G, H, g, n, pages]; -inf where a page has no KV.
    """
    there = valid.unflatten(-1, (-1, size))[..., None]  # [G, H, pages, size, 1]
    keys = k.unflatten(-2, (-1, size))
    if means:
        low = high = keys.masked_fill(~there, 0.0).sum(dim=-2)
    else:
        low = keys.masked_fill(~there, torch.inf).amin(dim=-2)
        high = keys.masked_fill(~there, -torch.inf).amax(dim=-2)
    return summary_bounds(q, low, high, there.sum(dim=-2)[..., 0], means=means)


def summary_bounds(q: Tensor, low: Tensor, high: Tensor, count: Tensor, *, means: bool) -> Tensor:
    """Return `page_bounds` from summaries, float32 [G, H, pages, d], of pages of `count` KVs, int64 [G, H, pages].

    With means both summaries are the sum of the keys.
    """
    flat, empty = q.flatten(2, 3), (count == 0)[..., None]  # [G, H, g * n, d]
    low, high = (x.masked_fill(empty, 0.0) for x in (low, high))  # 0 x inf is no number
    if means:
        bounds = flat @ (low / count.clamp_min(1)[..., None]).mT
    else:
        bounds = flat.clamp_min(0.0) @ high.mT + flat.clamp_max(0.0) @ low.mT
    return bounds.masked_fill(empty.mT, -torch.inf).unflatten(2, q.shape[2:4])


def choose_pages(bounds: Tensor, visible: Tensor, size: int, most: int) -> Tensor:
    """Return the KVs that a query reads: of the page of the last one it sees, and of those with the largest bounds.

    Args:
        bounds: float32 [G, H, g, n, pages]; visible: bool [G, H, n, N].
        most: pages that a query head reads, at least 1.

    Returns:
        bool [G, H, g, n, N].
    """
    pages = bounds.shape[-1]
    seen = visible.unflatten(-1, (pages, size)).any(dim=-1)[:, :, None]  # [G, H, 1, n, pages]
    own = torch.where(seen, torch.arange(pages, device=bounds.device), -1).amax(dim=-1, keepdim=True)
    ranked = bounds.masked_fill(~seen, -torch.inf)
    ranked = ranked.scatter(-1, own.clamp_min(0).expand(*bounds.shape[:-1], 1), torch.inf)
    best = ranked.topk(min(most, pages), dim=-1).indices
    chosen = torch.zeros_like(bounds, dtype=torch.bool).scatter(-1, best, True)
    return chosen.repeat_interleave(size, dim=-1) & visible[:, :, None]
