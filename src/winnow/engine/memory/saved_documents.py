"""WHICH documents that were compressed before a prompt begins with, and why a request does not start from them."""

from collections.abc import Sequence as SequenceType

from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey
from winnow.engine.memory.chains import chain_of, is_portable
from winnow.eviction import SequenceEviction
from winnow.storage.prefix_files import PrefixFiles, SavedDocument
from winnow.values.json_values import json_value
from winnow.values.tenants import TenantName

_MOST_REASONS = 4


class SavedDocuments:
    """Lookup of the saved documents that a prompt begins with.

    Args:
        files: where they lie; None: there are none.

    Attributes:
        is_used: a request could start from one.
    """

    def __init__(self, files: PrefixFiles | None, block_size: int) -> None:
        self._files = files
        self._block_size = block_size
        self.is_used = False
        self._num_prompts = 0
        self._reasons: dict[str, None] = {}

    def documents(self, token_ids: SequenceType[int], tenant: TenantName) -> list[SavedDocument]:
        """Return stored documents that are proper prefixes of a prompt, longest first."""
        if self._files is None:
            return []
        self._num_prompts += 1
        chain = PrefixChain(tenant or "", self._block_size)
        chain.extend(token_ids)
        keys: dict[int, PrefixKey] = {}
        found = []
        for each in self._own():
            length = each.num_tokens
            if length < len(token_ids):
                if length not in keys:
                    keys[length] = chain.document_key(token_ids[:length])
                if keys[length] == each.document:
                    found.append(each)
        return found

    def has(
        self,
        document: SavedDocument,
        token_ids: SequenceType[int],
        tenant: TenantName,
        eviction: SequenceEviction | None,
    ) -> bool:
        """Return whether the store has what `eviction` leaves of a document at a prompt's beginning; notes why not."""
        if eviction is None:
            self.note_reason("the request keeps all KVs")
            return False
        chain = chain_of(token_ids, tenant, self._block_size, eviction)
        key, _ = chain.snapshots.get(document.num_tokens, (None, None))
        file = None if key is None or self._files is None else self._files.snapshot(key)
        if file is not None and is_portable(eviction.policy):
            self.is_used = True
            return True
        if document.policy != json_value(eviction.policy):
            self.note_reason("it was saved under another policy")
        elif document.kv_budget != eviction.budget:
            self.note_reason(
                f"it was saved with {document.kv_budget} KVs a row, and requests keep {eviction.budget} of its "
                f"{document.num_tokens} tokens (compression, kv_budget)"
            )
        else:
            self.note_reason("it was saved with other `protect`, after other rounds or another replay")
        return False

    def note_reason(self, reason: str) -> None:
        """Remember why a prompt that begins with a document does not start from it."""
        if len(self._reasons) < _MOST_REASONS:
            self._reasons[reason] = None

    def why_unused(self) -> str | None:
        """Return why no prompt so far could start from the store; None: one could, or there was none, or no store."""
        if self._files is None or self.is_used or not self._num_prompts:
            return None
        if not (documents := self._own()):
            return self._files.why_foreign()
        if self._reasons:
            return "a prompt begins with one, but " + "; ".join(self._reasons)
        shortest = documents[-1].num_tokens
        return f"no prompt begins with one under its tenant (the shortest has {shortest} tokens)"

    def _own(self) -> list[SavedDocument]:
        """Return the documents that fit this engine's model and cache, longest first."""
        assert self._files is not None, "only files have documents"
        return [each for each in self._files.documents() if each.made_for == self._files.form.made_for]
