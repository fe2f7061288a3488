"""A model as it was published: what its files say, behind one face for a directory and for a GGUF file."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from winnow.models.fast.blocks import Blocks


class Published(Protocol):
    """Source of a model's configuration, weights and tokenizer."""

    def config_values(self) -> dict[str, Any]:
        """Return what transformers' configuration is made from, `model_type` among it."""

    def check_config(self, config: "PretrainedConfig") -> None:
        """Refuse a configuration that leaves some of what the files say out."""

    def weights(self) -> dict[str, Any]:
        """Return keyword arguments of `from_pretrained` that name the weights."""

    def reading(self, *, keeps_blocks: bool = False) -> "AbstractContextManager[dict[str, Blocks]]":
        """Surround `from_pretrained`. Weights that kept their blocks, whose numbers the model lacks, come by name."""

    def check_weights(self, model: "PreTrainedModel", left_out: Collection[str]) -> None:
        """Refuse a model that left some of the weights out which the files hold: `left_out`, as transformers says."""

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Return the tokenizer, with its chat template; None where there is none."""

    def end_tokens(self, config: "PretrainedConfig") -> list[int]:
        """Return tokens that end an answer, as the model's makers say."""


def open_published(path: Path, *, reads_codes: bool = True) -> Published:
    """Return the files of a model at `path`: a directory, or a GGUF file.

    Args:
        reads_codes: weights of few bits in safetensors are read here; else by what transformers has for them.

    Raises:
        UnsupportedModelError: the file is no GGUF file, or a damaged one, or packages that read such files are missing.
    """
    if not path.is_file():
        from winnow.models.load.directory import ModelDirectory
        from winnow.models.load.quantized import QuantizedDirectory

        return (QuantizedDirectory.at(path) if reads_codes else None) or ModelDirectory(path)
    from winnow.models.load.gguf.file import GgufFile

    return GgufFile.open(path)
