"""Place of a model: a directory or file as it was named, or the local copy of a repository of the Hub."""

import re
from collections.abc import Sequence
from pathlib import Path

from winnow.config import ModelConfig
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.process.digest import BESIDE_WEIGHTS, TOKENIZER_FILES

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
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_repository(model: str | Path | None) -> bool:
    """Return whether a model is named as `org/name`: a directory of that name comes first."""
    return isinstance(model, str) and _REPOSITORY.fullmatch(model) is not None and not Path(model).exists()


def locate_model(config: ModelConfig) -> Path:
    """Return the directory or GGUF file of a model, fetched where it is a repository of the Hub.

    Raises:
        UnsupportedModelError: no such directory, file, repository, revision or access, or no network.
        ConfigError: `revision` of something that has none.
    """
    model = config.model
    if is_repository(model):
        return _fetch(str(model), config.revision)
    if config.revision is not None:
        raise ConfigError(
            f"revision needs a model of the Hub (org/name), got {config.revision!r} and {model}"
        )
    path = DEMO_MODEL if model is None else Path(model)
    if not path.is_dir() and not path.is_file():
        raise UnsupportedModelError(f"model: cannot load {path}: no such directory or file: {path}")
    return path


def locate_tokenizer(config: ModelConfig) -> Path | None:
    """Return the directory of the tokenizer that takes the place of the model's own; None: that one is taken. Raises
    UnsupportedModelError: as `locate_model`; or it holds no tokenizer."""
    named = config.tokenizer
    if named is None:
        return None
    path = _fetch(str(named), None, BESIDE_WEIGHTS) if is_repository(named) else Path(named)
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise UnsupportedModelError(f"tokenizer: {path} is no directory with a {TOKENIZER_FILES[0]}")
    return path


def fetched_repositories() -> list[tuple[str, int]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    return sorted((each.repo_id, each.size_on_disk) for each in found if each.repo_type == "model")


def _fetch(repository: str, revision: str | None, patterns: Sequence[str] = PATTERNS) -> Path:
    # Imported here: a model in a directory does without the network's libraries.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        found = snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_NOT_WANTED)
        )
    except GatedRepoError:
        reason = "the Hub gives it to those alone who accepted its terms (`hf auth login`, or HF_TOKEN)"
    except RepositoryNotFoundError:
        reason = "the Hub has no such repository, or shows it to others alone (`hf auth login`, or HF_TOKEN)"
    except RevisionNotFoundError:
        reason = "the repository has no such revision"
    except (OSError, ValueError) as error:  # no network, disk full, an unusable name
        kind = type(error).__name__
        reason = f"the Hub answered: {kind}: {' '.join(str(error).split())[:200]}"
        if kind in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
            reason = (
                "it is not in the local cache, and the Hub is not reached (HF_HUB_OFFLINE, or no network)"
            )
    else:
        return Path(found)
    shown = repository if revision is None else f"{repository} at {revision}"
    reason = f"no directory of that name, and {reason}"
    raise UnsupportedModelError(f"model: cannot load {shown}: {reason}") from None
