"""State of a sequence right after a round of eviction, as the prefix index keeps it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from winnow.cache.accounting.prefix_chain import PrefixKey
from winnow.cache.layout import IntArray


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The KVs of a sequence right after a round.

    Nothing changes them: a sequence that begins with them copies what it changes.

    The blocks count as KV memory. What lies beside them on the host counts nowhere: 8 bytes a token, 4 a row and 4 a
    block, and a sum of each row's keys under scores that use it. A snapshot has at least a block in some row, so
    memory bounds their number.

    Attributes:
        key: `PrefixChain.snapshot_key` of tokens and rule.
        token_ids: int64 [n], all that are computed.
        rule: all that the KVs follow from besides them.
        lengths: int32 [layers, heads], KVs of each row.
        blocks: int32 [m], row by row. No sequence holds those that are partly filled.
        num_rounds: how many rounds the KVs have seen.
    """

    key: PrefixKey
    token_ids: IntArray
    rule: Hashable
    lengths: IntArray
    blocks: IntArray
    num_rounds: int = 1

    @classmethod
    def of(
        cls,
        key: PrefixKey,
        token_ids: Sequence[int],
        rule: Hashable,
        lengths: IntArray,
        blocks: IntArray,
        num_rounds: int = 1,
    ) -> "Snapshot":
        return cls(key, np.array(token_ids, dtype=np.int64), rule, lengths.copy(), blocks, num_rounds)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
