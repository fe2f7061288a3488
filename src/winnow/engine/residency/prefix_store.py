"""Compressed prefixes on disk: one safetensors file each, named by what they follow from."""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from winnow.cache import CacheLayout
from winnow.cache.accounting.prefix_index import PrefixKey, Snapshot
from winnow.cache.formats import ITEM_BYTES
from winnow.cache.layout import IntArray, round_up
from winnow.errors import ConfigError, PrefixStoreError
from winnow.json_values import dump_json

FORMAT = "winnow prefix 2"


@dataclass(frozen=True)
class SavedPrefix:
    """A file of a store.

    Attributes:
        lengths: KVs of each row, int32 [layers, heads].
        data: of the rows' blocks, as `Executor.write_blocks` takes it.
        num_rounds: how many rounds the KVs have seen.
        position_offset: token index minus stored position.
        states: what the prefix has beside blocks, as `Executor.write_states` takes it.
    """

    lengths: IntArray
    data: NDArray[np.uint8]
    num_rounds: int
    position_offset: int
    states: dict[str, NDArray[Any]]


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


class _UnusableError(Exception):
    """Reason for which a file is not used."""


class PrefixStore:
    """A directory of compressed prefixes.

    A file is used only if it was written for the same model and cache, and its bytes are those that were written:
    anything else counts as not found, with a warning. Files appear whole or not at all.

    Args:
        model: what identifies the model and the number format in which it computes.
        layout: of the cache; a file holds whole blocks.

    Raises:
        ConfigError: `directory` is none.
    """

    def __init__(self, directory: Path, model: str, layout: CacheLayout) -> None:
        if not directory.is_dir():
            raise ConfigError(f"prefix_store must be a directory, got {str(directory)!r}")
        self._directory = directory
        self._layout = layout
        # Kinds have their codecs with groups and rotations, which names do not tell.
        kinds = [(kind.key_size, kind.value_size, repr(kind.codec), repr(kind.form)) for kind in layout.kinds]
        rows = layout.heads, layout.kind_of.tolist(), layout.block_size
        self._made_for = dump_json([FORMAT, model, kinds, repr(layout.wide), rows])
        self._warned: set[Path] = set()
        self._documents: dict[Path, SavedDocument | None] = {}
        self._listed_at: int | None = None

    def path(self, key: PrefixKey) -> Path:
        """Return where the snapshot of that key lies, if it was saved."""
        name = sha256(self._made_for.encode() + key).hexdigest()
        return self._directory / f"{name}.safetensors"

    # -- reading -------------------------------------------------------------------------------------------------

    def documents(self) -> list[SavedDocument]:
        """Return what the files were saved for, this engine's or another's, the longest first.

        The directory is read again when it has changed.
        """
        try:
            changed_at = self._directory.stat().st_mtime_ns
            if changed_at != self._listed_at:
                paths = sorted(self._directory.glob("*.safetensors"))
                known = self._documents
                self._documents = {
                    path: known[path] if path in known else _read_document(path) for path in paths
                }
                self._listed_at = changed_at
        except OSError:  # it went away: nothing can be found there
            self._documents, self._listed_at = {}, None
        found = [each for each in self._documents.values() if each is not None]
        return sorted(found, key=lambda each: -each.num_tokens)

    def own_documents(self) -> list[SavedDocument]:
        """Return, of these, those of this engine's model and cache."""
        return [each for each in self.documents() if each.made_for == self._made_for]

    def why_foreign(self) -> str:
        """Return why not even one file is this engine's."""
        if not self._documents:
            return "it holds no prefix"
        found = self.documents()
        if not found:
            return "none of its files can be read as a prefix with its tokens"
        model = json.loads(self._made_for)[1]
        if all(json.loads(each.made_for)[1] != model for each in found):
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
            with safe_open(path, framework="numpy") as file:  # maps it into memory
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            self._check(metadata, tensors, key, token_ids, num_accumulators)
            rounds, offset = (int(metadata[name]) for name in ("num_rounds", "position_offset"))
            states = {name: tensor for name, tensor in tensors.items() if not _is_own(name)}
            return SavedPrefix(tensors["lengths"], self._joined(tensors), rounds, offset, states)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, _UnusableError) as error:
            if path not in self._warned:
                self._warned.add(path)
                warnings.warn(f"the saved prefix {path} is not used: {error}", stacklevel=2)
            return None

    def _check(
        self,
        metadata: Mapping[str, str],
        tensors: Mapping[str, NDArray[Any]],
        key: PrefixKey,
        token_ids: Sequence[int],
        num_accumulators: int,
    ) -> None:
        if metadata.get("made_for") != self._made_for or metadata.get("key") != key.hex():
            raise _UnusableError("it was saved for another model, cache, prompt or policy")
        if metadata.get("sha256") != _digest(metadata, tensors):
            raise _UnusableError("its bytes are not those that were saved")
        layout = self._layout
        lengths = tensors.get("lengths", np.empty(0))
        if not _is(lengths, np.int32, (layout.num_layers, layout.num_kv_heads)) or lengths.min() < 0:
            raise _UnusableError("lengths of rows are missing")
        size = layout.block_size
        wanted: list[tuple[str, tuple[int, ...], Any]] = [("token_ids", (len(token_ids),), np.int64)]
        for number, blocks in enumerate(layout.by_kind(layout.row_blocks(lengths))):
            wanted += [
                (f"kvs.{number}", (blocks, layout.kinds[number].form.nbytes), np.uint8),
                (f"positions.{number}", (blocks, size), np.int32),
                (f"accumulators.{number}", (num_accumulators, blocks, size), np.float32),
            ]
        for name, shape, dtype in wanted:
            if not _is(tensors.get(name), dtype, shape):
                raise _UnusableError(f"{name} must be {np.dtype(dtype)} {shape}")
        if not np.array_equal(tensors["token_ids"], token_ids):
            raise _UnusableError("it is of other tokens")
        if lengths[~layout.has_row].any():
            raise _UnusableError("it has rows that the model has not")
        positions = np.concatenate([tensors[f"positions.{number}"] for number in range(len(layout.kinds))])
        is_inside = (positions >= 0).all() and (positions < len(token_ids)).all()
        if lengths.max() > len(token_ids) or not is_inside:
            raise _UnusableError("it holds more than its tokens")
        self._check_wide(tensors, len(token_ids))

    def _check_wide(self, tensors: Mapping[str, NDArray[Any]], num_tokens: int) -> None:
        layout = self._layout
        vector = layout.head_dim * ITEM_BYTES[layout.wide.dtype]
        for number, (layers, sinks, recent) in enumerate(layout.wide_windows(num_tokens)):
            place = tensors.get(f"wide.{number}.place", np.empty(0))
            count = len(place)
            for name, shape, dtype in (
                ("place", (count,), np.int64),
                ("k", (len(layers), layout.num_kv_heads, count, vector), np.uint8),
                ("v", (len(layers), layout.num_kv_heads, count, vector), np.uint8),
                ("position", (len(layers), count), np.int32),
            ):
                if not _is(tensors.get(f"wide.{number}.{name}"), dtype, shape):
                    raise _UnusableError(f"wide.{number}.{name} must be {np.dtype(dtype)} {shape}")
            if count and not (place.min() >= 0 and place.max() < sinks + recent):
                raise _UnusableError("something wide has no place")

    def _joined(self, tensors: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
        """Return tensors as `CacheLayout.host_bytes` lays them out."""
        layout = self._layout
        count = layout.by_kind(layout.row_blocks(tensors["lengths"]))
        data = np.zeros(layout.host_bytes(count), dtype=np.uint8)
        for number, places in enumerate(self._places(count)):
            parts = [
                tensors[f"kvs.{number}"],
                tensors[f"positions.{number}"],
                *tensors[f"accumulators.{number}"],
            ]
            for part, place in zip(parts, places, strict=False):
                data[place] = np.ascontiguousarray(part).view(np.uint8).ravel()
        return data

    def _places(self, count: Sequence[int]) -> list[list[slice]]:
        """Return where KVs, positions and accumulators of each kind lie in the bytes of numbers of blocks."""
        found, start = [], 0
        for blocks, kind in zip(count, self._layout.kinds, strict=True):
            places = []
            for size in kind.part_bytes(self._layout.num_accumulators):
                places.append(slice(start, start + blocks * size))
                start += round_up(blocks * size, 8)
            found.append(places)
        return found

    # -- writing -------------------------------------------------------------------------------------------------

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
            data: of its blocks, as `Executor.read_blocks` gives it.
            num_accumulators: how many its policy uses.
            document: `PrefixChain.document_key` of its tokens.
            notes: the policy, its `kv_budget` and the number of tokens, for `SavedDocument`.
            states: what it has beside blocks, as `Executor.read_states` gives it.

        Raises:
            PrefixStoreError: the disk refuses it; the directory is as it was.
        """
        tensors = self._split(snapshot, data, num_accumulators) | dict(states)
        metadata = {
            "format": FORMAT,
            "made_for": self._made_for,
            "key": snapshot.key.hex(),
            "num_rounds": str(snapshot.num_rounds),
            "position_offset": str(snapshot.position_offset),
            "document": document.hex(),
            "notes": dump_json(dict(notes)),
        }
        metadata["sha256"] = _digest(metadata, tensors)
        path = self.path(snapshot.key)
        try:
            _write_whole(path, save(tensors, metadata))
        except OSError as error:
            raise PrefixStoreError(f"cannot save a prefix in {self._directory}: {error.strerror}") from error
        return path

    def _split(
        self, snapshot: Snapshot, data: NDArray[np.uint8], num_accumulators: int
    ) -> dict[str, NDArray[Any]]:
        """Return the tensors of a file. What lies behind the ends of rows, which may be another's, is not written."""
        layout, lengths, size = self._layout, snapshot.lengths, self._layout.block_size
        num_blocks = layout.row_blocks(lengths)
        filled = np.full(int(num_blocks.sum()), size)
        rest = lengths.ravel() % size
        filled[layout.partly_filled(lengths)] = rest[rest > 0]
        everywhere = np.arange(size) >= filled[:, None]  # [blocks, block_size]
        tensors: dict[str, NDArray[Any]] = {
            "token_ids": snapshot.token_ids.astype(np.int64),
            "lengths": lengths.astype(np.int32),
        }
        kinds, count = layout.kinds_of(num_blocks[None]), layout.by_kind(num_blocks)
        for number, (kind, places) in enumerate(zip(layout.kinds, self._places(count), strict=True)):
            behind = everywhere if kinds is None else everywhere[kinds == number]
            kvs, positions, *accumulators = (data[place].copy() for place in places)
            kvs = kvs.reshape(len(behind), kind.form.nbytes)
            for field, offset in kind.form.fields:
                part = kvs[:, offset : offset + size * field.slot_bytes]
                part.reshape(len(behind), size, field.slot_bytes)[behind] = 0
            numbers = [
                positions.view(np.int32),
                *(each.view(np.float32) for each in accumulators[:num_accumulators]),
            ]
            shaped = [np.where(behind, 0, each.reshape(behind.shape)).astype(each.dtype) for each in numbers]
            tensors |= {
                f"kvs.{number}": kvs,
                f"positions.{number}": shaped[0],
                f"accumulators.{number}": np.array(shaped[1:], dtype=np.float32).reshape(
                    num_accumulators, *behind.shape
                ),
            }
        return tensors


def _read_document(path: Path) -> SavedDocument | None:
    """Return the header of a file; None: it cannot be read, or an earlier version wrote it, which named no document."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        notes, made_for = json.loads(metadata["notes"]), metadata["made_for"]
        json.loads(made_for)[1]  # `why_foreign` reads it
        return SavedDocument(
            made_for,
            bytes.fromhex(metadata["document"]),
            int(notes["tokens"]),
            notes["policy"],
            int(notes["kv_budget"]),
        )
    except (OSError, SafetensorError, LookupError, TypeError, ValueError):
        return None


def _is_own(name: str) -> bool:
    """Return whether a tensor of a file is the store's own: tokens, lengths, or a part of blocks."""
    return name.partition(".")[0] in ("token_ids", "lengths", "kvs", "positions", "accumulators")


def _is(tensor: NDArray[Any] | None, dtype: Any, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tensor.dtype == dtype and tensor.shape == shape


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> str:
    """Return SHA-256 over all that a file holds, but for the digest itself."""
    digest = sha256(
        dump_json({name: metadata[name] for name in sorted(metadata) if name != "sha256"}).encode()
    )
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        digest.update(dump_json([name, str(tensor.dtype), tensor.shape]).encode())
        digest.update(tensor.view(np.uint8).reshape(-1).data if tensor.size else b"")
    return digest.hexdigest()


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, also after a loss of power."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
