"""KCache: keys on the device, values on the host."""

from dataclasses import replace

import numpy as np

from winnow_lab.papers.plan.comparison import Comparison, comparison_table, times_batch
from winnow_lab.plan.calibrate import fit
from winnow_lab.plan.hardware import HARDWARE
from winnow_lab.plan.models import MODELS
from winnow_lab.plan.step_time import PARTS, Factors, StepTimes, StepWork
from winnow_lab.report.tables import TextTable

KCACHE = (
    (1, 1, 55.3, (43.7, 43.4, 42.9)),
    (1, 8, 321.0, (277.1, 256.2, 222.2)),
    (1, 16, 485.9, (441.0, 389.7, 315.7)),
    (4, 1, 50.7, (41.9, 41.7, 41.2)),
    (4, 8, 212.0, (225.9, 211.8, 188.0)),
    (4, 14, 251.2, (290.8, 267.8, 231.4)),
    (4, 23, None, (349.2, 316.2, 266.2)),
    (7, 1, 46.7, (40.5, 40.1, 39.6)),
    (7, 8, 158.4, (189.8, 180.1, 162.6)),
    (7, 13, None, (223.2, 209.5, 186.1)),
    (15, 1, 38.3, (36.5, 36.4, 36.0)),
    (15, 3, 65.9, (76.6, 75.8, 73.7)),
    (15, 5, None, (102.5, 100.4, 95.1)),
)
"""Thousands of prompt tokens, batch, printed tokens/s: of the full cache (None: out of memory), with N=32, 64, 128."""
_TOP = (32, 64, 128)
_KCACHE_NEW = 1024


def attention_costs(
    batch: float, tokens: float, hidden: float, heads: float, top: float | None = None
) -> dict[str, tuple[float, float]]:
    """KCache's Table 1: operations and bytes of each part of a decode step's attention, in 16 bits.

    Args:
        tokens: KVs of each sequence; hidden: d, which `heads` heads share; top: N; None: the full cache.
    """
    b, s, d, n = batch, tokens, hidden, heads
    rows = s if top is None else top
    return {
        "Q, K, V": (6 * b * d * d, 12 * b * d + 6 * d * d),
        "S": (2 * b * s * d, 2 * b * (d + d * s + n * rows)),
        "A": (2 * b * rows * d, 2 * b * (n * rows + rows * d + d)),
        "O": (2 * b * d * d, 4 * b * d + 2 * d * d),
    }


def kcache_attention() -> TextTable:
    """KCache's Table 1 for Llama 2 7B: operations, bytes and operations a byte."""
    model, tokens, batch = MODELS["llama-2-7b"], 4096, 8
    shape = batch, tokens, model.hidden_size, model.num_query_heads
    full, tiered = attention_costs(*shape), attention_costs(*shape, top=128)
    lines = []
    for part in full:
        both = (f"{ops:.4g} | {read:.4g} | {ops / read:.4g}" for ops, read in (full[part], tiered[part]))
        lines.append(" | ".join((part, *both)))
    return TextTable.read(
        f"KCache, table 1: attention of a layer in a decode step (Llama 2 7B, batch {batch}, {tokens} tokens)",
        "part | operations | bytes | a byte | N=128: operations | bytes | a byte",
        lines,
        [
            "Of A with N the text prints 1 / (1 + 1/h + 1/s) operations a byte; its own columns give 1/N for 1/s."
        ],
    )


def kcache_work(prompt: int, batch: int, top: int | None) -> StepWork:
    """Prefill and 1024 decode steps of Llama-2-7B; `top`: V's rows that come back per head, None: all on the device."""
    model = MODELS["llama-2-7b"]
    one = StepWork.prefill(prompt, 0)
    work = times_batch(one, batch)
    middle = prompt + _KCACHE_NEW / 2
    kvs = batch * middle * _KCACHE_NEW
    link = 0.0
    if top is not None:
        kvs = kvs / 2 + batch * top * _KCACHE_NEW / 2  # keys of all, values of the best
        # Layers above the first fetch their rows: two bytes an element.
        share = (model.num_layers - 1) / model.num_layers
        link = 2.0 * batch * top * model.rows * model.head_dim * _KCACHE_NEW * share
    tokens = batch * _KCACHE_NEW
    attended = batch * middle * _KCACHE_NEW
    return work.plus(StepWork(_KCACHE_NEW, tokens, tokens, kvs, attended, tokens, link_bytes=link))


def kcache() -> TextTable:
    """KCache's Table 3: the full cache's rows fit the factors, one constant and the link those with N=32 of batch 1."""
    model = MODELS["llama-2-7b"]
    times = StepTimes(model, HARDWARE["KCache-64GB"], 2 * model.num_params, 2 * model.kv_elements())
    fitted = [
        (kcache_work(1024 * thousands, batch, None), batch * _KCACHE_NEW / printed)
        for thousands, batch, printed, _ in KCACHE
        if printed is not None
    ]
    matrix = np.array([[times.ideal(work)[part] for part in PARTS] for work, _ in fitted])
    factors = fit(matrix, np.array([seconds for _, seconds in fitted]), Factors(), 0.02)
    times = replace(times, factors=factors)
    # What selecting costs beside the bytes, per layer and step: from batch 1 at 1k tokens.
    alone = kcache_work(1024, 1, _TOP[0])
    extra = (_KCACHE_NEW / KCACHE[0][3][0] - times.seconds(alone)) / (_KCACHE_NEW * model.num_layers)
    rows = []
    for thousands, batch, printed, with_top in KCACHE:
        label = f"{thousands}k/1k, batch {batch}"
        if printed is not None:
            seconds = times.seconds(kcache_work(1024 * thousands, batch, None))
            rows.append(Comparison(f"{label}, full", printed, batch * _KCACHE_NEW / seconds))
        for top, said in zip(_TOP, with_top, strict=True):
            seconds = times.seconds(kcache_work(1024 * thousands, batch, top))
            seconds += max(extra, 0.0) * _KCACHE_NEW * model.num_layers
            rows.append(Comparison(f"{label}, N={top}", said, batch * _KCACHE_NEW / seconds))
    return comparison_table(
        "KCache: tokens per second (Llama 2 7B, 64 GB, 1 TB/s, 180 TFLOPS)",
        "tokens/s",
        rows,
        (
            f"Fitted to the full cache's {len(fitted)} rows, and {extra * 1e6:.0f} us a layer to one row of KCache;",
            "the link is taken as 32 GB/s, which the paper does not give for this card. Cause of errors: gathered rows",
            "do not reach that, and its cost grows with N and batch.",
        ),
    )
