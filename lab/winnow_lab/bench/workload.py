"""Fixed work: a number of requests of fixed lengths."""

import random
from dataclasses import dataclass

from winnow.config import option
from winnow.values.checks import check_counts


@dataclass(frozen=True)
class Workload:
    """Requests that differ only in the tokens of their prompts, all there from the start."""

    requests: int = option(32, "requests, all submitted at once", aliases=("num_prompts",))
    prompt_tokens: int = option(
        512, "random tokens of each prompt", aliases=("input_len", "random_input_len")
    )
    new_tokens: int = option(
        64,
        "tokens of each answer, greedy, past the end of text",
        aliases=("output_len", "random_output_len"),
    )
    prompt_seed: int = option(0, "of the prompts")

    def __post_init__(self) -> None:
        check_counts(self, zero=("prompt_seed",))

    @property
    def sequence_tokens(self) -> int:
        """Prompt and answer of one request."""
        return self.prompt_tokens + self.new_tokens

    @property
    def output_tokens(self) -> int:
        """Number of tokens of all answers."""
        return self.requests * self.new_tokens

    @property
    def total_tokens(self) -> int:
        """Number of tokens of all prompts and answers."""
        return self.requests * self.sequence_tokens

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return token ids, the same for every engine that is given the same work."""
        generator = random.Random(self.prompt_seed)
        return [
            [generator.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.requests)
        ]
