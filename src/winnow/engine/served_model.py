"""Facts of a model that an engine needs beside its executor."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from winnow.engine.residency.prefix_store import PrefixStore
from winnow.errors import ConfigError
from winnow.eviction import UNKNOWN_MODEL, ModelTraits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def no_store(directory: Path) -> PrefixStore:
    """Refuse a store, where there are no KVs to save."""
    raise ConfigError(f"a simulated engine has no KVs that could be saved to {directory}")


@dataclass(frozen=True)
class ServedModel:
    """Facts of a model that an engine needs beside its executor.

    Attributes:
        trained_len: longest sequence that it was trained for.
        tokenizer: for the text of answers and the words of replays; None: there are none.
        eos_token_ids: tokens that end an answer.
        open_store: opens a directory of saved prefixes.
    """

    vocab_size: int
    max_model_len: int
    trained_len: int
    tokenizer: "PreTrainedTokenizerBase | None" = None
    eos_token_ids: frozenset[int] = frozenset()
    traits: ModelTraits = UNKNOWN_MODEL
    open_store: Callable[[Path], PrefixStore] = no_store
