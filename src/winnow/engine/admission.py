"""What is checked before a request may enter: nothing that passes here can fail for lack of room later."""

from winnow.cache import CacheManager
from winnow.errors import CapacityError, ContextLengthError, InvalidRequestError
from winnow.sampling import SamplingParams
from winnow.units import format_bytes


def admit(
    token_ids: list[int],
    params: SamplingParams,
    cache: CacheManager,
    vocab_size: int,
    max_model_len: int,
    kv_memory: int,
) -> int:
    """Check a request and return how many tokens each of its answers may have.

    `params.max_tokens` is cut to what the context leaves. Without one, the answer may fill context and KV memory.

    Raises:
        InvalidRequestError: an empty prompt, or token ids that the model does not have.
        ContextLengthError: the prompt leaves no room for an answer.
        CapacityError: prompt and answer could not fit into the KV memory even alone.
    """
    if not token_ids:
        raise InvalidRequestError("prompt must hold at least 1 token, got none")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(f"prompt token ids must be between 0 and {vocab_size - 1}, got {wrong}")
    params.validate_for(vocab_size)
    if len(token_ids) >= max_model_len:
        raise ContextLengthError(
            f"prompt must be shorter than the context of {max_model_len} tokens (max_model_len), got {len(token_ids)}"
        )
    # The last token of an answer is never computed, so it needs no KV.
    left = min(max_model_len - len(token_ids), cache.capacity - len(token_ids) + 1)
    wanted = max_model_len - len(token_ids) if params.max_tokens is None else params.max_tokens
    max_tokens = min(wanted, max_model_len - len(token_ids))
    if left < 1 or (params.max_tokens is not None and max_tokens > left):
        raise CapacityError(
            f"prompt of {len(token_ids)} tokens with max_tokens {max_tokens} needs room for "
            f"{len(token_ids) + max_tokens - 1} KVs a row, kv_memory {format_bytes(kv_memory)} holds {cache.capacity}"
        )
    return min(max_tokens, left)
