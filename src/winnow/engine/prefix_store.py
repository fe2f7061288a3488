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
from winnow.cache.formats import ITEM_BYTES
from winnow.cache.layout import IntArray, round_up
from winnow.cache.prefix_index import PrefixKey, Snapshot
from winnow.errors import ConfigError, PrefixStoreError
from winnow.json_values import dump_json

FORMAT = "winnow prefix 1"


@dataclass(frozen=True)
class SavedPrefix:
    """A file of a store.

    Attributes:
        lengths: KVs of each row, int32 [layers, heads].
        data: of the rows' blocks, as `Executor.write_blocks` takes it.
        num_rounds: how many rounds the KVs have seen.
        position_offset: token index minus stored position.
        wide: what is wide of the prefix, as `Executor.write_wide` takes it.
    """

    lengths: IntArray
    data: NDArray[np.uint8]
    num_rounds: int
    position_offset: int
    wide: dict[str, NDArray[Any]]


@dataclass(frozen=True)
class SavedDocument:
    """What a file of a store says of itself; nothing of it is checked yet.

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
    """Why a file is not used."""


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
        shape = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size)
        # Where values lie apart, blocks are padded.
        apart = [] if layout.value_tier is None else [repr(layout.block_format)]
        # The codec with its groups and rotations, which its name does not tell.
        self._made_for = dump_json([FORMAT, model, repr(layout.codec), repr(layout.wide), shape, *apart])
        self._warned: set[Path] = set()
        self._documents: dict[Path, SavedDocument | None] = {}
        self._listed_at: int | None = None

    def path(self, key: PrefixKey) -> Path:
        """Where the snapshot of that key lies, if it was saved."""
        name = sha256(self._made_for.encode() + key).hexdigest()
        return self._directory / f"{name}.safetensors"

    # -- reading -------------------------------------------------------------------------------------------------

    def documents(self) -> list[SavedDocument]:
        """What the files were saved for, this engine's or another's, the longest first.

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
        """Of these, those of this engine's model and cache."""
        return [each for each in self.documents() if each.made_for == self._made_for]

    def why_foreign(self) -> str:
        """Why not even one file is this engine's."""
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
        """The snapshot of a key, if it is of these tokens; None: there is none that can be used.

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
            wide = {name: tensor for name, tensor in tensors.items() if name.startswith("wide.")}
            return SavedPrefix(tensors["lengths"], self._joined(tensors), rounds, offset, wide)
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
        blocks = int(layout.row_blocks(lengths).sum())
        for name, shape, dtype in (
            ("token_ids", (len(token_ids),), np.int64),
            ("kvs", (blocks, layout.block_format.nbytes), np.uint8),
            ("positions", (blocks, layout.block_size), np.int32),
            ("accumulators", (num_accumulators, blocks, layout.block_size), np.float32),
        ):
            if not _is(tensors.get(name), dtype, shape):
                raise _UnusableError(f"{name} must be {np.dtype(dtype)} {shape}")
        if not np.array_equal(tensors["token_ids"], token_ids):
            raise _UnusableError("it is of other tokens")
        positions = tensors["positions"]
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
        """Tensors as `CacheLayout.host_bytes` lays them out."""
        blocks, layout = len(tensors["kvs"]), self._layout
        data = np.zeros(layout.host_bytes(blocks), dtype=np.uint8)
        parts = [tensors["kvs"], tensors["positions"], *tensors["accumulators"]]
        for part, place in zip(parts, self._places(blocks), strict=False):
            data[place] = np.ascontiguousarray(part).view(np.uint8).ravel()
        return data

    def _places(self, blocks: int) -> list[slice]:
        """Where KVs, positions and each of the accumulators lie in the bytes of a number of blocks."""
        places, start = [], 0
        for size in self._layout.part_bytes:
            places.append(slice(start, start + blocks * size))
            start += round_up(blocks * size, 8)
        return places

    # -- writing -------------------------------------------------------------------------------------------------

    def save(
        self,
        snapshot: Snapshot,
        data: NDArray[np.uint8],
        num_accumulators: int,
        document: bytes,
        notes: Mapping[str, Any],
        wide: Mapping[str, NDArray[Any]],
    ) -> Path:
        """Write a snapshot, in place of one of the same key. Returns its path.

        Args:
            data: of its blocks, as `Executor.read_blocks` gives it.
            num_accumulators: how many its policy uses.
            document: `PrefixChain.document_key` of its tokens.
            notes: the policy, its `kv_budget` and the number of tokens, for `SavedDocument`.
            wide: what is wide of it, as `Executor.read_wide` gives it.

        Raises:
            PrefixStoreError: the disk refuses it; the directory is as it was.
        """
        tensors = self._split(snapshot, data, num_accumulators) | dict(wide)
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
        """The tensors of a file. What lies behind the ends of rows is nobody's, or another's, and is not written."""
        layout, lengths = self._layout, snapshot.lengths
        blocks = len(snapshot.blocks)
        kvs, positions, *accumulators = (data[place].copy() for place in self._places(blocks))
        kvs = kvs.reshape(blocks, layout.block_format.nbytes)
        filled = np.full(blocks, layout.block_size)
        rest = lengths.ravel() % layout.block_size
        filled[layout.partly_filled(lengths)] = rest[rest > 0]
        behind = np.arange(layout.block_size) >= filled[:, None]  # [blocks, block_size]
        for field, offset in layout.block_format.fields:
            part = kvs[:, offset : offset + layout.block_size * field.slot_bytes]
            part.reshape(blocks, layout.block_size, field.slot_bytes)[behind] = 0
        numbers = [
            positions.view(np.int32),
            *(each.view(np.float32) for each in accumulators[:num_accumulators]),
        ]
        shaped = [np.where(behind, 0, each.reshape(behind.shape)).astype(each.dtype) for each in numbers]
        return {
            "token_ids": snapshot.token_ids.astype(np.int64),
            "lengths": lengths.astype(np.int32),
            "kvs": kvs,
            "positions": shaped[0],
            "accumulators": np.array(shaped[1:], dtype=np.float32).reshape(num_accumulators, *behind.shape),
        }


def _read_document(path: Path) -> SavedDocument | None:
    """The header of a file; None: it cannot be read, or an earlier version wrote it, which named no document."""
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


def _is(tensor: NDArray[Any] | None, dtype: Any, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tensor.dtype == dtype and tensor.shape == shape


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 over all that a file holds, but for the digest itself."""
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
