"""What kind of text a token is, for policies that keep kinds."""

import string

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from winnow.eviction import PUNCTUATION, SPECIAL


def token_kinds(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> Tensor:
    """The kind of every token id, uint8 [vocab_size]: SPECIAL, PUNCTUATION, or 0; all 0 without a tokenizer."""
    kinds = torch.zeros(vocab_size, dtype=torch.uint8)
    if tokenizer is None:
        return kinds
    for token, text in enumerate(tokenizer.batch_decode([[i] for i in range(vocab_size)])):
        text = text.strip()
        if text and all(character in string.punctuation for character in text):
            kinds[token] = PUNCTUATION
    special = [token for token in tokenizer.all_special_ids if 0 <= token < vocab_size]
    kinds[special] = SPECIAL
    return kinds
