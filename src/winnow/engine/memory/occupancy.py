"""Occupancy of the KV memory at a moment: its holders, and how much of each layer and head stays."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from winnow.cache import CacheLayout, Ledger
from winnow.engine.requests.request import Sequence


@dataclass(frozen=True)
class Occupancy:
    """The KV memory in use, between two steps. Looks at every block: for now and then, not for every step.

    Attributes:
        filled_bytes: of the slots that hold KVs; the rest of the blocks held is reserved, or the end of a row's last
            block.
        tenants: tenant -> bytes of the blocks of its running answers; shared blocks count for each.
        kept: KVs per token computed, mean over running answers, by layer and head; empty: none runs.
    """

    tenants: dict[str, int]
    kept: list[list[float]]
    filled_bytes: int = 0


def measure_occupancy(running: Iterable[Sequence], ledger: Ledger, layout: CacheLayout) -> Occupancy:
    """Add up what running sequences hold; one look at each row's length."""
    tenants: dict[str, int] = {}
    kept = np.zeros((layout.num_layers, layout.num_kv_heads))
    count = 0
    for sequence in running:
        if sequence.kv.slot is None or not sequence.kv.num_computed:
            continue
        lengths = ledger.lengths[sequence.kv.slot]
        held = layout.device_bytes(layout.by_kind(layout.row_blocks(lengths)))
        tenant = sequence.request.tenant or ""
        tenants[tenant] = tenants.get(tenant, 0) + held
        kept += lengths / sequence.kv.num_computed
        count += 1
    return Occupancy(tenants, (kept / count).round(4).tolist() if count else [], ledger.filled_bytes)
