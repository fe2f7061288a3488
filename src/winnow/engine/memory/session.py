"""A conversation's last state, as a handle on what the prefix index holds of it."""

from dataclasses import dataclass, field

import numpy as np

from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey
from winnow.cache.layout import IntArray
from winnow.engine.memory.chains import SessionRule
from winnow.values.images import PromptImage, prefix_ids
from winnow.values.tenants import TenantName

SessionKey = tuple[TenantName, str]


@dataclass(eq=False)
class Session:
    """A conversation's last state.

    Attributes:
        token_ids: int64 [n], all that were computed.
        turns: numbers of tokens at which its turns begin.
        system: tokens of the system prompt.
        snapshot: the key of what rounds left of the first tokens; None: all are kept as they were computed.
        num_compressed: how many these are.
        rule: of the snapshot; a policy of None has compressed it for its age, and any request continues with it.
        whole_from: the first token behind which compressions for its age have left everything.
        memory: device bytes beyond which its oldest turns are compressed; None: no limit.
        outgrown: it is larger than its memory, and cannot be compressed to it; the prefix cache keeps it as any prefix.
        aging: a request that compresses it is under way.
        keys: under which the index may hold it, those of the first tokens first.
    """

    name: str
    tenant: TenantName
    chain: PrefixChain
    token_ids: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    images: tuple[PromptImage, ...] = ()
    turns: list[int] = field(default_factory=lambda: [0])
    system: int = 0
    snapshot: PrefixKey | None = None
    num_compressed: int = 0
    rule: SessionRule | None = None
    whole_from: int = 0
    memory: int | None = None
    outgrown: bool = False
    aging: bool = False
    last_used: float = 0.0
    num_turns: int = 0
    keys: list[PrefixKey] = field(default_factory=list)

    @property
    def prefix_ids(self) -> list[int]:
        return prefix_ids(self.token_ids.tolist(), self.images)

    def note_keys(self, block_size: int) -> None:
        whole = len(self.token_ids) // block_size
        self.keys = [key for key, _ in self.chain.links[:whole]]
        if len(self.token_ids) % block_size:
            self.keys.append(self.chain.tail_key(self.prefix_ids))
        if self.snapshot is not None:
            self.keys = [self.snapshot]
