"""Memory of blocks on a tier, asked of the executor before the ledger hands them out."""

from winnow.cache import Ledger
from winnow.cache.layout import PAGE_ENTRIES, ceil_div
from winnow.config import SchedulerConfig
from winnow.engine.executor import Executor


class TierGrants:
    """Keeps as many blocks granted as a sequence of full length and a step may take.

    So a lack of host memory, or of room on a disk, is met as any lack of blocks is: by waiting and by preemption.
    """

    def __init__(self, ledger: Ledger, executor: Executor, config: SchedulerConfig) -> None:
        layout, size = ledger.layout, ledger.size
        self._allocator, self._executor = ledger.allocator, executor
        step = ceil_div(config.max_num_batched_tokens, layout.block_size) + config.max_num_seqs
        per_row = size.pages_per_seq * PAGE_ENTRIES + step
        rows = layout.by_kind(layout.even_rows(1))
        self._ahead = {
            kind: rows[kind] * per_row for kind, each in enumerate(layout.kinds) if each.tier is not None
        }
        for kind in self._ahead:
            self._allocator.withhold(kind)

    def ask(self, again: bool) -> None:
        """Request missing tier memory before a step is planned; after a refusal only with `again`."""
        if again:
            self._allocator.refusal = None
        for kind, ahead in self._ahead.items():
            wanted = self._allocator.wanted(kind, ahead)
            if wanted and self._allocator.refusal is None:
                first, refusal = self._executor.grant(kind, wanted)
                self._allocator.supply(kind, first)
                self._allocator.refusal = refusal
