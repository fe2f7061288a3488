"""Compressed prefixes on disk: one safetensors file each, named by what they follow from."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnow.cache.accounting.prefix_chain import PrefixKey
from winnow.cache.accounting.prefix_index import Snapshot
from winnow.engine.residency.prefix_folder import read_file, write_whole
from winnow.engine.residency.prefix_format import FAULTS, SUFFIX, PrefixFormat, SavedPrefix
from winnow.errors import ConfigError, PrefixStoreError


@dataclass(frozen=True)
class SavedDocument:
    """Description of a store's file by itself; nothing of it is checked yet.

    Attributes:
        made_for: format, model and cache; another engine's file is of no use.
        document: `PrefixChain.document_key` of its tokens.
        num_tokens: of the document.
        policy, kv_budget: under which it was compressed; the policy as `json_value` gives it.
    """

    made_for: str
    document: bytes
    num_tokens: int
    policy: Any
    kv_budget: int


class PrefixStore:
    """A directory of compressed prefixes.

    A file is used only if it was written for the same model and cache, and its bytes are those that were written:
    anything else counts as not found, with a warning. Files appear whole or not at all.

    Raises:
        ConfigError: `directory` is none.
    """

    def __init__(self, directory: Path, form: PrefixFormat) -> None:
        if not directory.is_dir():
            raise ConfigError(f"prefix_store must be a directory, got {str(directory)!r}")
        self._directory = directory
        self._form = form
        self._warned: set[Path] = set()
        self._documents: dict[Path, SavedDocument | None] = {}
        self._listed_at: int | None = None

    def path(self, key: PrefixKey) -> Path:
        """Return where the snapshot of that key lies, if it was saved."""
        return self._directory / self._form.file_name(key)

    def documents(self) -> list[SavedDocument]:
        """Return the saved documents, of this and other engines, longest first.

        The directory is read again when it has changed.
        """
        try:
            changed_at = self._directory.stat().st_mtime_ns
            if changed_at != self._listed_at:
                paths = sorted(self._directory.glob("*" + SUFFIX))
                known = self._documents
                self._documents = {
                    path: known[path] if path in known else self._read_document(path) for path in paths
                }
                self._listed_at = changed_at
        except OSError:  # it went away: nothing can be found there
            self._documents, self._listed_at = {}, None
        found = [each for each in self._documents.values() if each is not None]
        return sorted(found, key=lambda each: -each.num_tokens)

    def own_documents(self) -> list[SavedDocument]:
        """Return the saved documents that fit this engine's model and cache, longest first."""
        return [each for each in self.documents() if each.made_for == self._form.made_for]

    def why_foreign(self) -> str:
        """Return why not even one file is this engine's."""
        if not self._documents:
            return "it holds no prefix"
        found = self.documents()
        if not found:
            return "none of its files can be read as a prefix with its tokens"
        if all(json.loads(each.made_for)[1] != self._form.model for each in found):
            return "its prefixes were saved for another model, dtype or weight_dtype"
        return "its prefixes were saved for another cache (kv_cache_dtype, kv_group, kv_wide, block_size)"

    def load(self, key: PrefixKey, token_ids: Sequence[int], num_accumulators: int) -> SavedPrefix | None:
        """Return the snapshot of a key, if it is of these tokens; None: there is none that can be used.

        Args:
            num_accumulators: how many its policy uses; what the cache has beyond them is 0.
        """
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            return self._form.read(path.name, partial(read_file, path), key, token_ids, num_accumulators)
        except FAULTS as error:
            if path not in self._warned:
                self._warned.add(path)
                warnings.warn(f"the saved prefix {path} is not used: {error}", stacklevel=2)
            return None

    def save(
        self,
        snapshot: Snapshot,
        data: NDArray[np.uint8],
        num_accumulators: int,
        document: bytes,
        notes: Mapping[str, Any],
        states: Mapping[str, NDArray[Any]],
    ) -> Path:
        """Write a snapshot, in place of one of the same key. Returns its path.

        Args:
            data, num_accumulators, states: as `PrefixFormat.encode` takes them.
            document: `PrefixChain.document_key` of its tokens.
            notes: the policy, its `kv_budget` and the number of tokens, for `SavedDocument`.

        Raises:
            PrefixStoreError: the disk refuses it; the directory is as it was.
        """
        path = self.path(snapshot.key)
        content = self._form.encode(snapshot, data, num_accumulators, notes, states, document=document.hex())
        try:
            write_whole(path, content)
        except OSError as error:
            raise PrefixStoreError(f"cannot save a prefix in {self._directory}: {error.strerror}") from error
        return path

    def _read_document(self, path: Path) -> SavedDocument | None:
        """Return the header of a file; None: it cannot be read, or names no document."""
        try:
            metadata = self._form.read_header(path.name, partial(read_file, path))
            notes, made_for = json.loads(metadata["notes"]), metadata["made_for"]
            json.loads(made_for)[1]  # `why_foreign` reads it
            return SavedDocument(
                made_for,
                bytes.fromhex(metadata["document"]),
                int(notes["tokens"]),
                notes["policy"],
                int(notes["kv_budget"]),
            )
        except FAULTS:
            return None
