"""What is reported of one token."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """What the model thought of one token at one position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 plus the number of tokens that were more probable; equals share a rank.
        decoded_token: its text, where somebody filled it in.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
