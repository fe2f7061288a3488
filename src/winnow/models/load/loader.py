"""Loader: from a directory to a model ready to run.

What reads a checkpoint imports transformers' model classes, and with them a hundred MiB; a packed model does without.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from winnow.config import ModelConfig
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.models.fast.packed.description import is_packed
from winnow.models.load.automatic import is_cpu, keeps_blocks, settle_formats
from winnow.models.load.hub import DEMO_MODEL, locate_model, locate_tokenizer
from winnow.models.load.loaded import LoadedModel, PlainModel
from winnow.models.load.processor import has_processor
from winnow.models.model.damage import loading
from winnow.process.lazy import importing
from winnow.process.native import is_installed, native_kernels
from winnow.process.progress import report
from winnow.process.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from winnow.models.load.packed.cache import CacheEntry
    from winnow.models.model.context import ContextLimit

__all__ = ["DEMO_MODEL", "load_model", "load_plain_model", "pack_model"]


def load_model(
    config: ModelConfig, *, ranks: Ranks = ALONE, hidden: bool = False, own_code: bool = False
) -> LoadedModel:
    """Load model and tokenizer, published or packed by `winnow pack`, from a directory or the Hub.

    Args:
        ranks: the others load it at the same time; each keeps its part.
        hidden: as transformers' class, whose last hidden states of all tokens can be read.
        own_code: by transformers' class, also where a file says all that is needed.

    Raises:
        UnsupportedModelError: no such directory or repository, no safetensors, weights missing or damaged, an
            architecture that attention here does not compute, or packed for another processor.
        ConfigError: `device`, `dtype`, or `max_model_len` beyond what the model can do.
    """
    path = locate_model(config)
    if is_packed(path):
        refused = None
        if hidden:
            refused = f"speculative_config: {path} is packed, without heads for drafts: give it as published"
        elif ranks.size > 1:
            got = f"got {ranks.size} for {path}: give it as published"
            refused = f"tensor_parallel_size must be 1 for a packed model, {got}"
        elif config.tokenizer is not None:
            refused = (
                f"tokenizer must be left out for a packed model, which holds one, got {config.tokenizer}"
            )
        elif config.lora is not None:
            refused = f"lora must be left out for a packed model (`winnow pack` takes it), got {config.lora}"
        if refused is not None:
            raise ConfigError(refused)
        kernels = native_kernels()
        if kernels is None:
            raise UnsupportedModelError(
                f"model: {path} is packed for Winnow's CPU kernels, which are not installed"
            )
        from winnow.models.load.packed.read import load_packed

        with loading(path):
            return load_packed(path, config, kernels)
    config = settle_formats(config, path) if ranks.size == 1 else config
    if not (hidden or own_code) and ranks.size == 1 and (direct := _load_directly(path, config)) is not None:
        return direct
    entry = None if hidden or ranks.size > 1 else _cache_entry(path, config)
    if entry is not None:
        kernels = native_kernels()
        assert kernels is not None, "else nothing is kept"
        found = entry.load(path, config, kernels)
        if found is not None:
            return found
    report("importing transformers")
    with importing():
        from winnow.models.load.checkpoint import load_checkpoint

    with loading(path):
        # No model is kept in a local; see `LLM.__init__`.
        if not hidden:
            return _keep(entry, path, *load_checkpoint(path, config, ranks=ranks))
        return load_checkpoint(path, config)[0].with_hidden_states()


def _load_directly(path: Path, config: ModelConfig) -> LoadedModel | None:
    """Return the model in a GGUF file whose blocks the kernels read as they are; None: transformers has to read it."""
    own = config.weight_dtype != "auto" or config.dtype == "auto"
    if (
        own
        or (config.tokenizer, config.lora) != (None, None)
        or not path.is_file()
        or path.suffix == ".json"
        or not is_cpu(config)
        or not keeps_blocks(config, path)
    ):
        return None
    kernels = native_kernels()
    assert kernels is not None, "else no blocks are kept"
    from winnow.models.load.gguf.direct import load_directly

    report("reading weights")
    with loading(path):
        return load_directly(path, config, kernels)


def _keep(entry: "CacheEntry | None", path: Path, loaded: LoadedModel, limit: "ContextLimit") -> LoadedModel:
    if entry is not None:
        entry.keep(loaded, path, limit)
    return loaded


def _cache_entry(path: Path, config: ModelConfig) -> "CacheEntry | None":
    images = has_processor(path) and not config.language_model_only  # a vision tower is not kept
    if images or not is_installed() or native_kernels() is None:
        return None
    from winnow.models.load.packed.cache import CacheEntry

    return CacheEntry.of(path, config)


def load_plain_model(config: ModelConfig) -> PlainModel:
    """Load any causal language model that is not packed, with the attention that transformers gives its class. Raises
    UnsupportedModelError, ConfigError: as `load_model`."""
    path = locate_model(config)
    if is_packed(path):
        raise UnsupportedModelError(
            f"model: {path} is packed for engine=paged; other engines run the model as it was published"
        )
    from winnow.models.load.checkpoint import load_plain_checkpoint

    with loading(path):
        return load_plain_checkpoint(path, settle_formats(config, path))


def pack_model(config: ModelConfig, out: Path) -> None:
    """Load a model as `config` says and write it packed into a directory that is not there yet, or empty.

    Raises:
        ConfigError: `out` is in use, or the model cannot be one for the CPU kernels.
        UnsupportedModelError: as `load_model`, or the model computes something that packing would lose.
    """
    path = locate_model(config)
    if is_packed(path):
        raise ConfigError(f"model: {path} is packed already")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"the directory to write must be new or empty, got {str(out)!r}")
    if native_kernels() is None:
        raise ConfigError("packing needs Winnow's CPU kernels, which are not installed")
    from winnow.models.load.packed.write import write_packed

    loaded = load_model(replace(config, device="cpu", optimize=True, model_cache=False), own_code=True)
    try:
        write_packed(loaded, path, out, tokenizer=locate_tokenizer(config))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {out}: {error}") from None
