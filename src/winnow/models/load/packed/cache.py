"""Models that were loaded before, packed, in the user's cache folder: the next start maps them.

An entry is a directory as `winnow pack` writes it, named by a hash of all that could make it another: the model's files
(where they lie, sizes, times, a digest of their contents), the options that change the packed form, and the versions of
what reads and computes. It is renamed into place once it is whole. Whatever is wrong with the folder costs a line of
warning, and never the run.
"""

import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from winnow.config import ModelConfig
from winnow.errors import WinnowError
from winnow.models.fast.packed.description import DESCRIPTION, FORMAT
from winnow.models.load.hub import locate_tokenizer
from winnow.models.load.loaded import LoadedModel
from winnow.models.model.context import ContextLimit
from winnow.process import native
from winnow.process.digest import model_files, sampled_digest
from winnow.process.progress import report
from winnow.values.units import format_bytes, parse_bytes

log = logging.getLogger("winnow.models")

SWITCH = "WINNOW_MODEL_CACHE"
"""An environment variable: 0 switches the cache off, a size such as 2GiB limits it."""
MAX_BYTES = 8 * 2**30
"""Bytes of all entries where nothing else is said; those that were used longest ago go first."""
_FREE_TIMES = 2
"""Multiple of an entry's size that must be free on the disk before it is written."""
_SEAL = "seal.json"
"""Sizes and times of an entry's files, written last: files that another hand has touched are not those."""
_PARTIAL = ".partial-"
_ABANDONED_SECONDS = 24 * 3600
_PACKAGES = ("winnow-llm", "torch", "transformers", "tokenizers")


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "winnow" / "models"


def cache_limit() -> int:
    """Return the bytes that all entries may take; 0: nothing is kept. Raises ConfigError: `SWITCH` names no size."""
    said = os.environ.get(SWITCH, "")
    return MAX_BYTES if said in ("", "1") else parse_bytes(said, SWITCH) if said != "0" else 0


@dataclass(frozen=True)
class KeptModel:
    packed_from: str
    form: str
    nbytes: int
    used_at: float


def list_cache() -> list[KeptModel]:
    """Return what is kept, that used last first; of what writers that died have left, the size alone."""
    found = []
    for path in cache_directory().glob("*"):
        try:
            values = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
            weights = "" if values["blocks"] is None else ", in blocks"
            named = str(values["packed_from"]), f"{values['dtype']}{weights}"
        except (OSError, ValueError, KeyError, TypeError):
            named = path.name, "unfinished"
        size = sum(file.lstat().st_size for file in _files(path))
        found.append(KeptModel(*named, size, path.lstat().st_mtime))
    return sorted(found, key=lambda each: -each.used_at)


def clear_cache() -> None:
    for path in cache_directory().glob("*"):
        _remove(path)


@dataclass(frozen=True)
class CacheEntry:
    path: Path
    tokenizer: Path | None = None  # directory of the tokenizer that takes the place of the model's own

    @classmethod
    def of(cls, model: Path, config: ModelConfig) -> "CacheEntry | None":
        """Return the place of a model as `config` loads it. None: the cache is off, or nothing of this kind is kept."""
        on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
        plain = config.load_format == "auto" and config.optimize and on_cpu
        limit = cache_limit()
        if not config.model_cache or not limit or not plain or config.lora is not None:
            return None
        own = locate_tokenizer(config)
        files = model_files(model)
        files |= set() if own is None else model_files(own)
        try:
            stats = [(str(file.resolve()), file.stat()) for file in sorted(files)]
            if sum(stat.st_size for _, stat in stats) > limit:
                return None
            isa = os.environ.get(native.ISA_VARIABLE)
            key = [
                [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats],
                sampled_digest(files),
                [config.dtype, config.weight_dtype, str(own)],
                [FORMAT, sys.version_info[:2], *map(version, _PACKAGES), native.extension_identity()],
                [isa, native.instruction_sets(), native.block_instruction_sets()],
            ]
            name = sha256(json.dumps(key).encode()).hexdigest()[:32]
            return cls(cache_directory() / name, own)
        except (OSError, RuntimeError):  # a file that cannot be read, which loading will name; no home
            return None

    def load(self, source: Path, config: ModelConfig, kernels: native.Kernels) -> LoadedModel | None:
        """Return the model, if it is there and whole; what is not goes. Raises ConfigError: `max_model_len` beyond what
        the model can do."""
        from winnow.errors import ConfigError
        from winnow.models.load.packed.read import load_packed

        if not os.path.lexists(self.path):
            return None
        try:
            _require_seal(self.path)
            found = load_packed(self.path, config, kernels, source=source)
            os.utime(self.path)
            return found
        except ConfigError:
            raise
        except (OSError, ValueError, WinnowError) as error:
            log.info("an entry of the model cache is not used: %s", error)
            _remove(self.path)
            return None

    def keep(self, loaded: LoadedModel, source: Path, limit: ContextLimit) -> None:
        """Write a model that was loaded, where it can be packed and the folder takes it."""
        from winnow.models.load.packed.write import other_tensors, packed_tensors, write_packed

        if loaded.decoder is None or limit.tokens is None:
            return
        tensors = (*packed_tensors(loaded.decoder), *other_tensors(loaded.decoder))
        size = sum(tensor.nbytes for _, tensor in tensors)
        if size > cache_limit():
            return
        partial: Path | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            free = shutil.disk_usage(self.path.parent).free
            if free < _FREE_TIMES * size:
                reason = f"{self.path.parent} has {format_bytes(free)} free"
                log.warning("winnow: the model is not kept for the next start: %s", reason)
                return
            report(f"keeping it for the next start, {format_bytes(size)} in {self.path.parent}")
            partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self.path.parent))
            kept = replace(loaded, trained_len=limit.tokens)
            write_packed(kept, source, partial, decoder=loaded.decoder, tokenizer=self.tokenizer)
            _seal(partial)
            _remove(self.path)
            partial.rename(self.path)
            _make_room(self.path)
        except (OSError, WinnowError, ValueError) as error:
            log.warning("winnow: the model is not kept for the next start: %s", error)
        finally:
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)


def _seal(directory: Path) -> None:
    """Let an entry's files be on the disk, and write down what they are."""
    for file in _files(directory):
        with file.open("rb") as written:
            os.fsync(written.fileno())
    (directory / _SEAL).write_text(json.dumps(_state(directory)), encoding="utf-8")


def _require_seal(directory: Path) -> None:
    """Raise ValueError or OSError unless an entry is this user's own, and its files are as they were written."""
    stat = directory.lstat()
    if not directory.is_dir() or directory.is_symlink() or stat.st_uid != os.getuid():
        raise ValueError(f"{directory} is not a directory of this user's")
    sealed: Mapping[str, Any] = json.loads((directory / _SEAL).read_text(encoding="utf-8"))
    if sealed != _state(directory) or DESCRIPTION not in sealed:
        raise ValueError(f"files in {directory} have changed")


def _state(directory: Path) -> dict[str, Any]:
    files = {file: file.lstat() for file in _files(directory) if file.name != _SEAL}
    return {
        str(file.relative_to(directory)): [stat.st_size, stat.st_mtime_ns, stat.st_mode, stat.st_uid]
        for file, stat in files.items()
    }


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if not path.is_dir() or path.is_symlink()]


def _make_room(kept: Path) -> None:
    """Remove the entries that were used longest ago until all fit, and what writers that died have left."""
    entries = []
    for path in kept.parent.iterdir():
        used = path.lstat().st_mtime
        if path.name.startswith(_PARTIAL):
            if time.time() - used > _ABANDONED_SECONDS:
                _remove(path)
        elif path.is_dir() and not path.is_symlink():
            entries.append((path != kept, -used, path, sum(file.lstat().st_size for file in _files(path))))
    total, limit = 0, cache_limit()
    for _, _, path, size in sorted(entries):
        total += size
        if total > limit and path != kept:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
