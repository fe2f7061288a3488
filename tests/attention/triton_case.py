"""One comparison of the Triton backend with the reference, on cases so small that the interpreter can take them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from paged import PagedBatch, paged_batch
from torch import Tensor

from winnow.attention import AttentionBackend, AttentionObserver, AttentionSpec, ReferenceBackend
from winnow.attention.triton import TritonBackend
from winnow.attention.triton.launch import Launch, Tuning, interpreted
from winnow.cache import KVPool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# So small that short rows are cut into several splits, tiles and blocks.
SMALL = Tuning(Launch(16, 16, 4, 1), Launch(16, 16, 4, 1), Launch(16, 16, 4, 1), min_split=16, max_splits=3)
# Largest difference from the reference, relative to what is compared (and absolute below 1).
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def build(seed: int, counts: Sequence[int], **sizes: Any) -> PagedBatch:
    """A small case; what `paged_batch` takes may be given in its place."""
    small = {"longest": 50, "group": 3, "head_dim": 8, "device": DEVICE}
    return paged_batch(seed, counts, **{**small, **sizes})


@dataclass(frozen=True)
class Result:
    """What one backend made of a case."""

    out: Tensor
    pool: KVPool


def compute(backend: AttentionBackend, case: PagedBatch, spec: AttentionSpec) -> Result:
    """Write and attend in a copy of the case's pool."""
    cache = case.with_own_pool()
    backend.prepare(cache, case.spans).write(case.layer, case.k, case.v)
    return Result(backend.prepare(cache, case.spans).attend(case.layer, case.q, spec), cache.pool)


def compare(
    case: PagedBatch, spec: AttentionSpec, tuning: Tuning | None = SMALL, score_atol: float | None = None
) -> None:
    """Assert that Triton computes what the reference does, in every slot of the pool.

    Args:
        score_atol: absolute tolerance of scores; None: that of the format.
    """
    expected = compute(ReferenceBackend(), case, spec)
    found = compute(TritonBackend(tuning), case, spec)
    # The interpreter cuts float32 off where it stores bfloat16; a GPU rounds to nearest.
    cut = interpreted() and case.k.dtype != torch.bfloat16 == case.cache.pool.of_layer(-1).k.dtype
    for name, rtol in (("k", 2**-7 * cut), ("v", 2**-7 * cut), ("position", 0)):
        a, b = (
            pool.position if name == "position" else pool.of_layer(-1).fields[name]
            for pool in (found.pool, expected.pool)
        )
        torch.testing.assert_close(a, b, rtol=rtol, atol=0, equal_nan=True, msg=f"{name} differs")
    tolerance = max(TOLERANCE[case.q.dtype], TOLERANCE[torch.bfloat16] * cut)
    assert found.out.dtype == expected.out.dtype
    torch.testing.assert_close(found.out, expected.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        found.pool.accumulators, expected.pool.accumulators, rtol=tolerance, atol=score_atol or tolerance
    )


def with_observers(case: PagedBatch, observe: Sequence[AttentionObserver | None]) -> PagedBatch:
    """The same case, its queries telling the scores something else."""
    return replace(case, spans=replace(case.spans, observe=tuple(observe)))
