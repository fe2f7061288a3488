"""Number formats that `auto` stands for on a CPU, by what `winnow bench formats` has measured (formats.json).

Three things have a format: activations and KVs (`dtype`), the weights that linear layers keep (`weight_dtype`; blocks
of a file stay as they are wherever kernels multiply them), and what both are multiplied as, which follows from these
and the instruction set: the kernels have one product for each.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from winnow.config import ModelConfig
from winnow.errors import WinnowError
from winnow.models.fast.packed.description import is_packed
from winnow.models.model.blocks import RAW
from winnow.models.model.damage import read_object
from winnow.process.digest import model_files
from winnow.process.native import instruction_set, is_installed

if TYPE_CHECKING:
    from winnow.models.load.directory import ModelDirectory
    from winnow.models.load.gguf.file import GgufFile

    Published: TypeAlias = ModelDirectory | GgufFile

log = logging.getLogger("winnow.models")

SMALL = 64 * 2**20
"""Bytes of weights below which a model stays as exact as it can be: it is no faster otherwise."""
MEASURED = Path(__file__).with_name("formats.json")
"""Tokens/s of one sequence, of 16 and of a prompt, by instruction set, weights of the file, and dtype."""
WITHIN = 0.9
"""Part of the fastest format's speed at which a narrower one is taken: KVs have half the bytes."""
_STANDS_FOR = {"amx": "avx512_bf16", "amx_emulated": "avx512_bf16"}  # sets that were not measured
_WIDE_KINDS = ("F32", "F16", "BF16", "F64")


def settle_formats(config: ModelConfig, path: Path) -> ModelConfig:
    """Return a configuration whose `dtype` and `weight_dtype` are what `auto` means for a model on a CPU.

    `dtype` is what `fastest_dtype` finds, but float32 where the weights are of float32 themselves, for models of few
    bytes, and for what is not read from files. Linear layers keep the blocks of a quantized GGUF file, or 8 bits (q8_0)
    of what it has in another form.
    """
    if config.dtype != "auto" or not is_cpu(config) or config.load_format != "auto" or is_packed(path):
        return config
    try:
        files = model_files(path) if path.is_file() else path.glob("*.safetensors")
        num_bytes = sum(file.stat().st_size for file in files)
        kept = keeps_blocks(config, path)
        weights = "blocks" if kept and config.weight_dtype == "auto" else "bfloat16"
        dtype = cpu_dtype(num_bytes, "float32" if _is_float32(path) else "", weights)
        kinds = _quantized_kinds(path)
        eight_bits = num_bytes >= SMALL and config.weight_dtype == "auto" and bool(kinds)
    except (OSError, WinnowError):
        return config  # which loading will name
    config = replace(config, dtype=dtype)
    if eight_bits and not kept and config.optimize and config.engine == "paged" and is_installed():
        config = replace(config, weight_dtype="q8_0")
    form = "its own blocks" if kept and config.weight_dtype == "auto" else config.weight_dtype
    widened = ", ".join(kind for kind in kinds if not kept or kind not in RAW)
    log.info(
        "%s: dtype %s, weight_dtype %s%s", path.name, dtype, form, widened and f"; widened are its {widened}"
    )
    return config


def is_cpu(config: ModelConfig) -> bool:
    return config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())


def cpu_dtype(num_bytes: int, own: str, weights: str = "bfloat16", isa: str | None = None) -> str:
    """Return what `dtype` auto is on a CPU for weights of this many bytes, of dtype `own` by the model's configuration;
    empty: not said. `weights` and `isa` as in `fastest_dtype`; without the latter this processor's is taken."""
    isa = isa or instruction_set()
    return "float32" if isa is None or num_bytes < SMALL or own == "float32" else fastest_dtype(isa, weights)


def fastest_dtype(isa: str, weights: str) -> str:
    """Return the fastest dtype, by the geometric mean of what was measured: bfloat16 within `WITHIN` of it.

    Args:
        isa: an instruction set.
        weights: of the file, in blocks or of two bytes (bfloat16).
    """
    rates: Mapping[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))["rates"]
    speed = {
        dtype: prod(of) ** (1 / len(of)) for dtype, of in rates[_STANDS_FOR.get(isa, isa)][weights].items()
    }
    return "bfloat16" if speed["bfloat16"] >= WITHIN * speed["float32"] else "float32"


def _is_float32(path: Path) -> bool:
    if path.is_file():
        return False
    values = read_object(path / "config.json")
    text = values.get("text_config")
    places = [values, text] if isinstance(text, dict) else [values]
    return "float32" in [place.get(name) for place in places for name in ("dtype", "torch_dtype")]


def open_published(path: Path, *, reads_codes: bool = True, images: bool = False) -> "Published":
    """Return the files of a model at `path`: a directory, or a GGUF file, which raises as `GgufFile.open`.

    Weights of few bits in safetensors are read here if `reads_codes`, else by what transformers has for them. A GGUF
    file is read with the vision tower beside it, if `images`.
    """
    if not path.is_file():
        from winnow.models.load.directory import ModelDirectory
        from winnow.models.load.quantized import QuantizedDirectory

        return (QuantizedDirectory.at(path) if reads_codes else None) or ModelDirectory(path)
    from winnow.models.load.gguf.file import GgufFile
    from winnow.models.load.gguf.vision import GgufVision, find_tower

    tower = find_tower(path) if images and find_spec("PIL") is not None else None
    file = GgufFile.open(path)
    if tower is None:
        return file
    log.info("%s: pictures are read by %s", path.name, tower.path.name)
    return GgufVision(file.header, tower)


def keeps_blocks(config: ModelConfig, path: Path, file: object = None) -> bool:
    """Return whether linear layers keep the blocks of a file on a CPU, where kernels multiply them so. `file` is the
    `Published` at the path, where it is open."""
    if path.suffix == ".json" or config.load_format != "auto":
        return False
    if not config.optimize or config.engine != "paged" or not is_installed():
        return False
    if not path.is_file():
        from winnow.models.load.quantized import QuantizedDirectory

        return QuantizedDirectory.at(path) is not None
    from winnow.models.load.gguf.file import GgufFile

    return (file if isinstance(file, GgufFile) else GgufFile.open(path, again=True)).keeps_blocks


def _quantized_kinds(path: Path) -> list[str]:
    """Return the kinds of blocks of a GGUF file, the most frequent first; none: most of its weights are numbers."""
    if not path.is_file() or path.suffix == ".json":
        return []
    from winnow.models.load.gguf.file import GgufFile

    kinds = [*GgufFile.open(path, again=True).weight_kinds]
    return [kind for kind in kinds if kind not in _WIDE_KINDS and kinds[0] not in _WIDE_KINDS]
