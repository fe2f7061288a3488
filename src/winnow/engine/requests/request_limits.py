"""Limits of a request that the model sets: its vocabulary and its context."""

from winnow.errors import ContextLengthError, InvalidRequestError
from winnow.sampling import SamplingParams


def check_tokens(token_ids: list[int], params: SamplingParams, vocab_size: int) -> None:
    """Check a prompt and its parameters against the vocabulary.

    Raises:
        InvalidRequestError: the prompt is empty, or the model does not have a token.
    """
    if not token_ids:
        raise InvalidRequestError("prompt must hold at least 1 token, got none")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(f"prompt token ids must be between 0 and {vocab_size - 1}, got {wrong}")
    params.validate_for(vocab_size)


def answer_limit(prompt_len: int, params: SamplingParams, context: int) -> int:
    """Return the limit of an answer's tokens: `max_tokens`, or the room in the context if that is less.

    Raises:
        ContextLengthError: the context leaves no room for an answer, or not for the tokens that it must begin with.
    """
    if prompt_len >= context:
        raise ContextLengthError(
            f"prompt must be shorter than the context of {context} tokens (max_model_len), got {prompt_len}"
        )
    if prompt_len + params.num_forced > context:
        raise ContextLengthError(
            f"prompt and forced_tokens must fit into the context of {context} tokens (max_model_len), "
            f"got {prompt_len} and {params.num_forced}"
        )
    wanted = context - prompt_len if params.max_tokens is None else params.max_tokens
    return min(wanted, context - prompt_len)
