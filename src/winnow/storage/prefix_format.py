"""Format of a prefix on disk: a safetensors file that says what it follows from, believed only if it is whole."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from winnow.cache import CacheLayout
from winnow.cache.accounting.prefix_chain import PrefixKey, Snapshot
from winnow.cache.formats import ITEM_BYTES
from winnow.cache.layout import IntArray, round_up
from winnow.values.json_values import dump_json

FORMAT = "winnow prefix 2"
SUFFIX = ".safetensors"

FAULTS = (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Errors of a file that is damaged, another engine's, or none of ours."""

Read = Callable[[int, int | None], NDArray[np.uint8]]
"""Function from first byte and the one after the last, None: all, to a file's bytes between them."""

_HEADER_BYTES = 2**16
"""Bytes that are read in hope that they hold all of a header."""
_DTYPES = {"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2"}
_DTYPES |= {f"{kind}{bits}": f"<{kind.lower()}{bits // 8}" for kind in "UIF" for bits in (32, 64)}
"""Types of tensors by their names in safetensors."""


@dataclass(frozen=True)
class SavedPrefix:
    """Content of a file: KVs of each row, int32 [layers, heads], and blocks and states as `Executor` takes them."""

    token_ids: list[int]
    lengths: IntArray
    data: NDArray[np.uint8]
    num_rounds: int
    states: dict[str, NDArray[Any]]
    notes: dict[str, Any] = field(default_factory=dict)


class PrefixFormat:
    """Reader and writer of the files of one cache and `model`, which identifies its number format too."""

    def __init__(self, model: str, layout: CacheLayout) -> None:
        self.model = model
        self._layout, self.block_size = layout, layout.block_size
        # Kinds have their codecs with groups and rotations, which names do not tell.
        kinds = [(kind.key_size, kind.value_size, repr(kind.codec), repr(kind.form)) for kind in layout.kinds]
        rows = layout.heads, layout.kind_of[:, 0].tolist(), layout.block_size
        wide = [repr(layout.wide)] * layout.wide.any
        self.made_for = dump_json([FORMAT, model, kinds, rows, *wide])

    def file_name(self, key: PrefixKey) -> str:
        return sha256(self.made_for.encode() + key).hexdigest() + SUFFIX

    def read(
        self, read: Read, key: PrefixKey, token_ids: Sequence[int] | int, num_accumulators: int, skip: int = 0
    ) -> SavedPrefix:
        """Return the prefix of a key, if it is of these tokens, or of as many. Raises one of `FAULTS`.

        Of a run of blocks, which its `notes` name as "links", some that follow one another may be asked for, after the
        first `skip`. What the cache has of accumulators beyond those that its policy uses is 0.
        """
        content = read(0, None)
        metadata = read_header(lambda start, stop: content[start:stop])
        tensors = _tensors(content)
        if metadata.get("made_for") != self.made_for or metadata.get("key") != key.hex():
            raise ValueError("it was saved for another model, cache, prompt or policy")
        if metadata.get("sha256") != _digest(metadata, tensors):
            raise ValueError("its bytes are not those that were saved")
        notes = json.loads(metadata["notes"])
        if "links" in notes:
            count = token_ids if isinstance(token_ids, int) else len(token_ids)
            tensors = self._some_blocks(tensors, skip, count, len(notes["links"]))
            notes["first"] += skip * self.block_size
        expected = tensors["token_ids"].tolist() if isinstance(token_ids, int) else list(token_ids)
        self._check(tensors, expected, num_accumulators, notes)
        states = {each: tensor.copy() for each, tensor in tensors.items() if not _is_own(each)}
        data, num_rounds = self._joined(tensors), int(metadata["num_rounds"])
        return SavedPrefix(expected, tensors["lengths"], data, num_rounds, states, notes)

    def _check(
        self,
        tensors: Mapping[str, NDArray[Any]],
        token_ids: Sequence[int],
        num_accumulators: int,
        notes: Mapping[str, Any],
    ) -> None:
        layout = self._layout
        lengths = tensors.get("lengths", np.empty(0))
        if not _is(lengths, np.int32, (layout.num_layers, layout.num_kv_heads)) or lengths.min() < 0:
            raise ValueError("lengths of rows are missing")
        size = layout.block_size
        wanted: list[tuple[str, tuple[int, ...], Any]] = [("token_ids", (len(token_ids),), np.int64)]
        for number, blocks in enumerate(layout.by_kind(layout.row_blocks(lengths))):
            wanted += [
                (f"kvs.{number}", (blocks, layout.kinds[number].form.nbytes), np.uint8),
                (f"positions.{number}", (blocks, size), np.int32),
                (f"accumulators.{number}", (num_accumulators, blocks, size), np.float32),
            ]
        # Of a run of blocks, each has what is wide under its own number.
        windows = [] if "links" in notes else layout.wide_windows(len(token_ids))
        for number, (layers, sinks, recent) in enumerate(windows):
            name, place = f"wide{number}", tensors.get(f"wide{number}.place", np.empty(0))
            rows = len(layers), len(place)
            vector = layout.head_dim * ITEM_BYTES[layout.wide.dtype]
            vectors = len(layers), layout.num_kv_heads, len(place), vector
            wanted += [(f"{name}.place", rows[1:], np.int64), (f"{name}.position", rows, np.int32)]
            wanted += [(f"{name}.{side}", vectors, np.uint8) for side in "kv"]
            if not ((place >= 0) & (place < sinks + recent)).all():
                raise ValueError("something wide has no place")
        for name, shape, dtype in wanted:
            if not _is(tensors.get(name), dtype, shape):
                raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}")
        if not np.array_equal(tensors["token_ids"], token_ids):
            raise ValueError("it is of other tokens")
        if lengths[~layout.has_row].any():
            raise ValueError("it has rows that the model has not")
        positions = np.concatenate([tensors[f"positions.{number}"] for number in range(len(layout.kinds))])
        end = int(notes.get("first", 0)) + len(token_ids)
        if lengths.max() > len(token_ids) or not ((positions >= 0) & (positions < end)).all():
            raise ValueError("it holds more than its tokens")

    def _some_blocks(
        self, tensors: dict[str, NDArray[Any]], skip: int, num_tokens: int, num_blocks: int
    ) -> dict[str, NDArray[Any]]:
        """Return what a file of rows of `num_blocks` blocks each holds of some tokens, after as many blocks."""
        layout, size = self._layout, self._layout.block_size
        whole, lengths = layout.row_blocks(layout.even_rows(num_blocks * size)), tensors["lengths"]
        end = skip * size + num_tokens
        if not np.array_equal(layout.row_blocks(lengths), whole) or end > lengths.max():
            raise ValueError("its rows are not of the blocks that it names")
        asked = range(skip, skip + -(-num_tokens // size))
        out = {
            name: tensor
            for name, tensor in tensors.items()
            if _is_own(name) or int(name.partition(".")[0]) in asked
        }
        out["token_ids"], out["lengths"] = (
            tensors["token_ids"][skip * size : end],
            layout.even_rows(num_tokens),
        )
        for number, rows in enumerate(layout.by_kind(layout.row_blocks(layout.even_rows(1)))):
            for name in (f"kvs.{number}", f"positions.{number}"):
                rest = tensors[name].shape[1:]
                columns = tensors[name].reshape(rows, num_blocks, *rest)
                out[name] = columns[:, skip : asked.stop].reshape(-1, *rest)
            out[f"accumulators.{number}"] = np.empty((0, rows * len(asked), size), dtype=np.float32)
        return out

    def _joined(self, tensors: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
        """Return tensors as `CacheLayout.host_bytes` lays them out."""
        layout = self._layout
        count = layout.by_kind(layout.row_blocks(tensors["lengths"]))
        data = np.zeros(layout.host_bytes(count), dtype=np.uint8)
        for number, places in enumerate(self._places(count)):
            kvs, positions = tensors[f"kvs.{number}"], tensors[f"positions.{number}"]
            parts = [kvs, positions, *tensors[f"accumulators.{number}"]]
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

    def encode(
        self,
        snapshot: Snapshot,
        data: NDArray[np.uint8],
        num_accumulators: int,
        notes: Mapping[str, Any],
        states: Mapping[str, NDArray[Any]],
        **more: str,
    ) -> bytes:
        """Return the content of a file.

        Args:
            data, states: as `Executor.read_blocks` and `read_states` give them.
            num_accumulators: how many its policy uses.
            notes: JSON values for who reads the header; "first": the number of tokens before its own, 0 if left out.
            more: entries of the header.
        """
        tensors = self._split(snapshot, data, num_accumulators) | dict(states)
        metadata = {
            "format": FORMAT,
            "made_for": self.made_for,
            "key": snapshot.key.hex(),
            "num_rounds": str(snapshot.num_rounds),
            "notes": dump_json(dict(notes)),
            **more,
        }
        metadata["sha256"] = _digest(metadata, tensors)
        return save(tensors, metadata)

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
            for each, offset in kind.form.fields:
                part = kvs[:, offset : offset + size * each.slot_bytes]
                part.reshape(len(behind), size, each.slot_bytes)[behind] = 0
            scores = np.zeros((num_accumulators, *behind.shape), dtype=np.float32)
            for score, whole in zip(scores, accumulators, strict=False):
                score[:] = np.where(behind, 0, whole.view(np.float32).reshape(behind.shape))
            place = np.where(behind, 0, positions.view(np.int32).reshape(behind.shape))
            tensors[f"kvs.{number}"], tensors[f"accumulators.{number}"] = kvs, scores
            tensors[f"positions.{number}"] = place.astype(np.int32)
        return tensors


def read_header(read: Read) -> dict[str, str]:
    """Read the header of a file, unchecked. Raises one of `FAULTS`."""
    header, _ = _header(read(0, _HEADER_BYTES), read)
    return dict(header.get("__metadata__") or {})


def _header(first: NDArray[np.uint8], read: Read) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its tensors begin."""
    end = 8 + int.from_bytes(first[:8].tobytes(), "little")
    header = first[8:end] if end <= len(first) else read(8, end)
    return json.loads(header.tobytes()), end


def _tensors(content: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    header, start = _header(content, lambda first, end: content[first:end])
    found = {}
    for name, about in header.items():
        if name != "__metadata__":
            first, end = about["data_offsets"]
            tensor = content[start + first : start + end].view(_DTYPES[about["dtype"]])
            found[name] = tensor.reshape(about["shape"])
    return found


def _is_own(name: str) -> bool:
    return name.partition(".")[0] in ("token_ids", "lengths", "kvs", "positions", "accumulators")


def _is(tensor: NDArray[Any] | None, dtype: Any, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tensor.dtype == dtype and tensor.shape == shape


def is_whole(read: Read) -> bool:
    """Return whether a file holds what was saved."""
    try:
        content = read(0, None)
        metadata = read_header(lambda start, stop: content[start:stop])
        return bool(metadata["sha256"] == _digest(metadata, _tensors(content)))
    except FAULTS:
        return False


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> str:
    """Return SHA-256 over all that a file holds, but for the digest itself."""
    others = {name: metadata[name] for name in sorted(metadata) if name != "sha256"}
    digest = sha256(dump_json(others).encode())
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        digest.update(dump_json([name, str(tensor.dtype), tensor.shape]).encode())
        digest.update(tensor.view(np.uint8).reshape(-1).data if tensor.size else b"")
    return digest.hexdigest()
