"""A model's tokenizer, and what kind of text a token is, for policies that keep kinds."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.eviction import PAPER_POOL
from winnow.models.model.damage import cannot_load, first_line, read_object
from winnow.process.digest import TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: Path, class_name: str | None = None) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer in a directory, or None where it has none: then prompts are token ids. Raises
    UnsupportedModelError: its files cannot be used. Without a `class_name`, as `tokenizer_class` gave it, looking for
    the class imports the configurations of all models."""
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        return None
    import transformers

    if (path / "tokenizer_config.json").is_file():
        read_object(path / "tokenizer_config.json")
    try:
        kind: Any = getattr(transformers, class_name or "AutoTokenizer", None)
        if class_name is not None and not _is_tokenizer(kind):
            raise ValueError(f"transformers has no tokenizer called {class_name!r}")
        return kind.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizers raises plain `Exception`
        raise cannot_load(path, f"its tokenizer is not usable: {first_line(error)}") from error


def tokenizer_class(tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    """Return the name under which transformers exports a tokenizer's class; None: there is none, or it does not."""
    import transformers

    name = type(tokenizer).__name__
    found = getattr(transformers, name, None)
    return name if _is_tokenizer(found) and type(tokenizer) is found else None


def token_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else value


def end_tokens(
    declared: Iterable[int], tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int
) -> frozenset[int]:
    """Return tokens that end an answer: those that the configurations tell, and the tokenizer's own.

    Fine-tunes for chat often change the tokenizer's end token and leave the configurations as they were. Without what
    the model cannot say: default configurations name such tokens.
    """
    own = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(token for token in (*declared, own) if token is not None and 0 <= token < vocab_size)


def _is_tokenizer(kind: object) -> bool:
    from transformers import PreTrainedTokenizerBase

    return isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerBase)


_SAMPLES = (
    (
        "The committee met on the second floor of the old library, where the windows look out over the river. "
        "It was decided that the bridge should be repaired before the winter, and that the cost would be shared "
        "by the towns on both sides.",
        4.3,
    ),
    ("4815162 3141592 2718281 1618033 9460730 5772156 6022140 8314462 1380649 6626070", 3.0),
)
"""Texts, each with the characters that one token of Llama 3 covers: of prose about 4.3, of digits 3, which its
pre-tokenizer groups them by."""
_MAX_POOL = 63


def text_pool(tokenizer: "PreTrainedTokenizerBase | None") -> int:
    """Return the odd number of tokens that cover the text of 7 tokens in the papers, at least 7; 7 without tokenizer.

    SnapKV and KV-Compress pool scores over 7 tokens, so that all of an important word or number stays. Their models
    spend a token on about 4 characters of prose and on 3 digits; one that spends a token on each digit needs 21.
    The text that needs most tokens decides: a pool that is too wide costs a few neighbours, one that is too narrow cuts
    numbers apart.
    """
    if tokenizer is None:
        return PAPER_POOL
    width = PAPER_POOL
    for text, paper_chars in _SAMPLES:
        # Numbers alone, since the blank before one is a token in some tokenizers.
        words = text.split() if text[0].isdigit() else [text]
        count = sum(len(tokenizer.encode(word, add_special_tokens=False)) for word in words)
        chars = sum(map(len, words)) / max(1, count)
        width = max(width, math.ceil(PAPER_POOL * paper_chars / chars - 1e-6))
    return min(width + (width + 1) % 2, _MAX_POOL)
