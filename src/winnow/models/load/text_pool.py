"""The width of pooling that covers as much text as in the papers, by the model's tokenizer.

SnapKV and KV-Compress pool scores over 7 tokens, so that all of an important word or number stays. Their models
(Llama 3, Mistral) spend a token on about 4 characters of prose, and Llama 3 one on 3 digits. A tokenizer that spends a
token on each digit needs 21 for the same number.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from winnow.eviction import PAPER_POOL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAMPLES: Mapping[str, float] = MappingProxyType(
    {
        "The committee met on the second floor of the old library, where the windows look out over the river. "
        "It was decided that the bridge should be repaired before the winter, and that the cost would be shared "
        "by the towns on both sides.": 4.3,
        "4815162 3141592 2718281 1618033 9460730 5772156 6022140 8314462 1380649 6626070": 3.0,
    }
)
"""Texts, each with the characters that one token of Llama 3 covers: of prose about 4.3, of digits 3, which its
pre-tokenizer groups them by."""
_MAX_POOL = 63


def text_pool(tokenizer: "PreTrainedTokenizerBase | None") -> int:
    """Return the odd number of tokens that cover the text of 7 tokens in the papers, at least 7; 7 without tokenizer.

    The text that needs most tokens decides: a pool that is too wide costs a few neighbours, one that is too narrow cuts
    numbers apart.
    """
    if tokenizer is None:
        return PAPER_POOL
    width = PAPER_POOL
    for text, paper_chars in _SAMPLES.items():
        count = sum(len(tokenizer.encode(word, add_special_tokens=False)) for word in _words(text))
        chars = sum(map(len, _words(text))) / max(1, count)
        width = max(width, math.ceil(PAPER_POOL * paper_chars / chars - 1e-6))
    return min(width + (width + 1) % 2, _MAX_POOL)


def _words(text: str) -> list[str]:
    """Return the pieces that are measured: numbers alone, since the blank before one is a token in some tokenizers."""
    return text.split() if text[0].isdigit() else [text]
