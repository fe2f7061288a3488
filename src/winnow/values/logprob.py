"""Report of one token's probability."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """Probability of one token at one position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 plus the number of tokens that were more probable; equals share a rank.
        decoded_token: its text by itself, where there is a tokenizer, with replacement characters for parts of
            characters.
        token_bytes: the bytes that it adds, or would add, to the answer's text in UTF-8, where there is a tokenizer:
            only they represent a part of a character. Those of an answer's tokens, joined, are its text, up to where
            a stop string cut it. Empty for special tokens that the text leaves out.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: bytes | None = None


LogprobDict = dict[int, Logprob]
