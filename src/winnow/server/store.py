"""Uploaded files and batches on disk: one directory, one process at a time."""

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from winnow.errors import ConfigError
from winnow.openai.errors import ApiError
from winnow.values.json_values import dump_json

_ID = re.compile(r"(file|batch)[-_][0-9a-f]{32}")
_CHUNK = 2**20

Record = dict[str, Any]


class Store:
    """Records of files and batches, each a JSON file that is replaced whole; files' contents beside them.

    A record is seen by its own tenant alone. Raises ConfigError: the directory cannot be used now.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            for name in ("files", "batches"):
                (directory / name).mkdir(parents=True, exist_ok=True)
            self._lock = (directory / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"files_dir {directory} is in use by another server") from None
        except OSError as error:
            raise ConfigError(f"files_dir {directory} cannot be used: {error.strerror}") from None
        self._records: dict[str, Record] = {}
        for path in sorted(directory.glob("*/*.json")):
            try:
                record = json.loads(path.read_bytes())
            except ValueError:
                continue  # no record of ours: those are replaced whole
            if isinstance(record, dict) and _ID.fullmatch(str(record.get("id"))):
                self._records[record["id"]] = record

    def close(self) -> None:
        self._lock.close()

    def save(self, record: Record) -> None:
        path = self._path(record["id"], ".json")
        draft = path.with_suffix(".draft")
        with draft.open("w", encoding="utf-8") as file:
            file.write(dump_json(record))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        self._records[record["id"]] = record

    def get(self, name: str, kind: str, tenant: str | None) -> Record:
        """Return a record. Raises ApiError: the tenant has none of that name."""
        record = self._records.get(name)
        if record is None or record["object"] != kind or record.get("tenant") != tenant:
            raise ApiError("not_found", f"there is no {kind} {name!r:.200}")
        return record

    def records(self, kind: str, tenant: str | None) -> list[Record]:
        """Return a tenant's records of one kind, newest first."""
        found = sorted(self._records.values(), key=lambda each: (-each["created_at"], each["id"]))
        return [each for each in found if each["object"] == kind and each.get("tenant") == tenant]

    def unfinished_batches(self) -> Iterator[Record]:
        """Yield batches of all tenants that another process has left."""
        for record in list(self._records.values()):
            if record["object"] == "batch" and record["status"] not in ENDED:
                yield record

    def keep_input(self, batch: str, name: str) -> None:
        """Let a batch keep a file's content, whatever becomes of the file. Raises ApiError: it is gone already."""
        try:
            os.link(self.content(name), self._path(batch, ".input"))
        except FileNotFoundError:
            raise ApiError("not_found", f"there is no file {name!r:.200}") from None
        except OSError:  # a file system without links
            shutil.copyfile(self.content(name), self._path(batch, ".input"))

    def input(self, record: Record) -> Path:
        """Return where a batch's input lies; one of an earlier version has the file alone."""
        kept = self._path(record["id"], ".input")
        return kept if kept.exists() else self.content(record["input_file_id"])

    def content(self, name: str) -> Path:
        """Return where a file's content lies, or a batch's results so far."""
        return self._path(name, ".jsonl")

    def add_file(
        self, source: BinaryIO, filename: str, purpose: str, tenant: str | None, name: str | None = None
    ) -> Record:
        """Keep a file: its content first, then the record that says so."""
        name = name or f"file-{uuid.uuid4().hex}"
        path = self.content(name)
        draft = path.with_suffix(".draft-content")
        try:
            with draft.open("wb") as file:
                shutil.copyfileobj(source, file, _CHUNK)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        record = {
            "id": name,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "tenant": tenant,
        }
        self.save(record)
        return record

    def delete_file(self, name: str, tenant: str | None) -> None:
        self.get(name, "file", tenant)
        del self._records[name]
        self._path(name, ".json").unlink(missing_ok=True)
        self.content(name).unlink(missing_ok=True)

    def _path(self, name: str, suffix: str) -> Path:
        assert _ID.fullmatch(name), "names of files are made here"
        folder = "files" if name.startswith("file") else "batches"
        return self._directory / folder / f"{name}{suffix}"


ENDED = ("failed", "completed", "expired", "cancelled")
"""States that a batch does not leave."""


def public(record: Record) -> Record:
    """Return a record as its tenant sees it."""
    return {name: value for name, value in record.items() if name != "tenant"}
