"""Place of a model: a directory or file as it was named, or the local copy of a repository of the Hub, or of a GGUF
file there, named as llama.cpp names it: `owner/name:Q4_K_M`."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from winnow.config import ModelConfig
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.process.digest import ADAPTER_FILES, BESIDE_WEIGHTS, TOKENIZER_FILES, part_names
from winnow.process.progress import report, reporter
from winnow.values.units import format_bytes

DEMO_MODEL = Path(__file__).parents[1] / "demo"

# Weights, tokenizer and configurations alone: other weight formats can carry code, and are large.
PATTERNS = ("*.safetensors", *BESIDE_WEIGHTS, "LICENSE*", "NOTICE*")
_FOLDER = "additional_chat_templates"
# A star matches slashes too, so all folders go whose names differ from this one's in some letter.
_NOT_WANTED = (
    *(f"{_FOLDER[:n]}{rest}" for n, letter in enumerate(_FOLDER) for rest in ("/*", f"[!{letter}]*/*")),
    *(f"{_FOLDER}{rest}" for rest in ("[!/]*/*", "/*/*")),
    *("*.bin", "*.py", "training_args*", "onnx*"),
)
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w./+-]+))?")
_USUAL_KIND = "Q4_K_M"
_UNREACHED = (
    *("LocalEntryNotFoundError", "IncompleteSnapshotError", "OfflineModeIsEnabled"),
    *("ConnectError", "ConnectTimeout", "ReadTimeout"),
)
# GGUF files that are no model of their own: towers for pictures, and statistics of activations.
_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)


def is_repository(model: str | Path | None, *, files: bool = True) -> bool:
    """Return whether a model is named as `org/name`, or, if `files`, as `org/name:FILE`, a GGUF file's name or the kind
    of its weights: a directory of that name comes first."""
    found = _REPOSITORY.fullmatch(model) if isinstance(model, str) else None
    return found is not None and (files or found[2] is None) and not Path(str(model)).exists()


def locate_model(config: ModelConfig) -> Path:
    """Return the directory or GGUF file of a model, fetched where it is a repository of the Hub; of a file of several
    parts the first, whichever is named.

    Raises:
        UnsupportedModelError: no such directory, file, repository, revision or access, or no network.
        ConfigError: `revision` of something that has none.
    """
    model = config.model
    if is_repository(model):
        repository, _, file = str(model).partition(":")
        if file:
            return _fetch_file(repository, file, config)
        try:
            path = _fetch(repository, config.revision)
        except UnsupportedModelError:
            if not cached_files(repository, config.revision):
                raise
        else:
            in_directory = config.load_format != "auto" or any(path.glob("*.safetensors"))
            if in_directory or not gguf_files(repository, config.revision):
                return path
        return _fetch_file(repository, "", config)
    if config.revision is not None:
        raise ConfigError(
            f"revision needs a model of the Hub (org/name), got {config.revision!r} and {model}"
        )
    path = DEMO_MODEL if model is None else Path(model)
    if path.is_file():
        return path.with_name(part_names(path.name)[0])
    if not path.is_dir():
        raise UnsupportedModelError(f"model: cannot load {path}: no such directory or file: {path}")
    return path


def locate_tokenizer(config: ModelConfig) -> Path | None:
    """Return the directory of the tokenizer that takes the place of the model's own; None: that one is taken. Raises
    UnsupportedModelError: as `locate_model`; or it holds no tokenizer."""
    named = config.tokenizer
    if named is None:
        return None
    fetched = is_repository(named, files=False)
    path = _fetch(str(named), None, BESIDE_WEIGHTS) if fetched else Path(named)
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise UnsupportedModelError(f"tokenizer: {path} is no directory with a {TOKENIZER_FILES[0]}")
    return path


def locate_adapter(config: ModelConfig) -> Path | None:
    """Return the directory or GGUF file of the adapter to be merged, if any. Raises UnsupportedModelError: as
    `locate_model`; or there is none."""
    if config.lora is None:
        return None
    named = str(config.lora).partition("=")[0]
    path = _fetch(named, None, ADAPTER_FILES) if is_repository(named, files=False) else Path(named)
    if not path.is_file() and not all((path / file).is_file() for file in ADAPTER_FILES):
        raise UnsupportedModelError(
            f"lora: {path} is neither a GGUF file nor a directory with {' and '.join(ADAPTER_FILES)}"
        )
    return path


def fetched_repositories() -> list[tuple[str, int]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    return sorted((each.repo_id, each.size_on_disk) for each in found if each.repo_type == "model")


def gguf_files(repository: str, revision: str | None = None, *, towers: bool = False) -> dict[str, int]:
    """Return bytes of a repository's GGUF files, by path, all parts of a file under that of its first; of those that
    lie in the cache where the Hub is not reached. `towers`: of vision towers instead. Raises UnsupportedModelError: as
    `locate_model`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        listed = [*HfApi().list_repo_tree(repository, recursive=True, revision=revision)]
        found = {each.path: int(each.size) for each in listed if hasattr(each, "size")}
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:  # access that is refused is one too
        raise _refused(repository, revision, error) from None
    except Exception as error:
        found = cached_files(repository, revision)
        if not found:
            raise _refused(repository, revision, error) from None
    sizes: dict[str, int] = {}
    for path in sorted(path for path in found if path.endswith(".gguf")):
        if "mmproj" not in path.lower() if towers else _BESIDE.search(path):
            continue
        first = part_names(path)[0]
        sizes[first] = sizes.get(first, 0) + found[path]
    return sizes


def cached_files(repository: str, revision: str | None = None) -> dict[str, int]:
    """Return bytes of a repository's GGUF files that lie in the Hub's cache, by path."""
    from huggingface_hub import snapshot_download

    options: Any = {"revision": revision, "local_files_only": True, "allow_patterns": []}
    try:
        folder = Path(snapshot_download(repository, **options))
    except (OSError, ValueError):
        return {}
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.gguf")}


def _fetch_file(repository: str, wanted: str, config: ModelConfig) -> Path:
    """Return a GGUF file of a repository, its first part, all of which lie beside it, and so does its vision tower.
    `wanted` is its path or name, or the kind of its weights as names have it; empty: as llama.cpp takes it, Q4_K_M, or
    else the first."""
    revision = config.revision
    sizes = gguf_files(repository, revision)
    first = part_names(wanted)[0]
    kind = re.compile(rf"(?:^|[-_./]){re.escape(wanted or _USUAL_KIND)}(?:[-.]|$)", re.IGNORECASE)
    found = [path for path in sizes if first in (path, Path(path).name)]
    found = found or sorted((path for path in sizes if kind.search(Path(path).name)), key=len)
    if not found and sizes and not wanted:
        found = list(sizes)
    if not found:
        have = ", ".join(f"{path} ({format_bytes(size)})" for path, size in sizes.items()) or "none"
        raise UnsupportedModelError(
            f"model: cannot load {repository}:{wanted}: of its GGUF files none has this name or kind; there are: {have}"
        )
    report(f"fetching {found[0]}, {format_bytes(sizes[found[0]])}")
    parts = part_names(found[0])
    path = _fetch_paths(repository, revision, parts) / parts[0]
    if not config.language_model_only and _has_kind_of_tower(path):
        for tower in [*gguf_files(repository, revision, towers=True)][:1]:
            _fetch_paths(repository, revision, [tower])
    return path


def _has_kind_of_tower(path: Path) -> bool:
    from winnow.models.load.gguf.vision import has_kind_of_tower

    return find_spec("gguf") is not None and has_kind_of_tower(path)


def _fetch_paths(repository: str, revision: str | None, paths: Sequence[str]) -> Path:
    return _fetch(repository, revision, [re.sub(r"([*?[])", r"[\1]", path) for path in paths], ())


def _fetch(
    repository: str,
    revision: str | None,
    patterns: Sequence[str] = PATTERNS,
    unwanted: Sequence[str] = _NOT_WANTED,
) -> Path:
    # Imported here: a model in a directory does without the network's libraries.
    from huggingface_hub import snapshot_download

    kinds: Any = {"allow_patterns": list(patterns), "ignore_patterns": list(unwanted)}
    try:
        found = snapshot_download(repository, revision=revision, tqdm_class=_reporting_bar(), **kinds)
    except Exception as error:  # no network, disk full, an unusable name; errors of httpx or httpx2
        raise _refused(repository, revision, error) from None
    return Path(found)


def _reporting_bar() -> type:
    """Return a bar that draws nothing and reports the bytes that are there; its updates come from other threads."""
    from tqdm import tqdm

    say = reporter()

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})
            self._counts = str(options.get("desc", "")).startswith("Reconstructing")

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts:
                say("fetching", int(self.n), int(self.total or 0), "B")

    return Bar


def _refused(repository: str, revision: str | None, error: Exception) -> UnsupportedModelError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    kind = type(error).__name__
    if isinstance(error, GatedRepoError):
        reason = "the Hub gives it to those alone who accepted its terms (`hf auth login`, or HF_TOKEN)"
    elif isinstance(error, RepositoryNotFoundError):
        reason = "the Hub has no such repository, or shows it to others alone (`hf auth login`, or HF_TOKEN)"
    elif isinstance(error, RevisionNotFoundError):
        reason = "the repository has no such revision"
    elif kind in _UNREACHED:
        reason = "it is not in the local cache, and the Hub is not reached (HF_HUB_OFFLINE, or no network)"
        if here := cached_files(repository, revision):
            reason += f"; of it are here: {', '.join(sorted(here))}"
    else:
        reason = f"the Hub answered: {kind}: {' '.join(str(error).split())[:200]}"
    shown = repository if revision is None else f"{repository} at {revision}"
    return UnsupportedModelError(f"model: cannot load {shown}: no directory of that name, and {reason}")
