"""Facts of a model that an engine needs beside its executor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from winnow.errors import ConfigError
from winnow.eviction import UNKNOWN_MODEL, ModelTraits
from winnow.storage.prefix_format import PrefixFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def no_format() -> PrefixFormat:
    """Refuse a format, where there are no KVs to save."""
    raise ConfigError("a simulated engine has no KVs that could be saved")


@dataclass(frozen=True)
class ServedModel:
    """Facts of a model that an engine needs beside its executor.

    Attributes:
        tokenizer: for the text of answers and the words of replays; None: there are none.
        eos_token_ids: tokens that end an answer.
        prefix_format: returns the format of prefixes on disk.
    """

    vocab_size: int
    max_model_len: int
    tokenizer: "PreTrainedTokenizerBase | None" = None
    eos_token_ids: frozenset[int] = frozenset()
    traits: ModelTraits = UNKNOWN_MODEL
    prefix_format: Callable[[], PrefixFormat] = no_format
