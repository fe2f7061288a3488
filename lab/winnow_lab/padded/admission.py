"""Checks of a request before it enters the padded engine."""

from winnow.engine.requests.request_limits import answer_limit, check_tokens
from winnow.errors import CapacityError, InvalidRequestError
from winnow.sampling import SamplingParams
from winnow.values.eviction_request import EVICTION_FIELDS
from winnow.values.units import format_bytes
from winnow_lab.padded.memory_budget import MemoryBudget


class PaddedAdmission:
    """Checks requests against model and memory: a request that passes can always be computed, if need be alone."""

    def __init__(self, budget: MemoryBudget, vocab_size: int, max_model_len: int) -> None:
        self._budget = budget
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def admit(self, token_ids: list[int], params: SamplingParams) -> int:
        """Check a request. Returns the maximum number of tokens of each of its answers.

        Raises:
            InvalidRequestError: the prompt is empty or has unknown token ids, or eviction is asked for.
            ContextLengthError: the prompt leaves no room for an answer.
            CapacityError: prompt and answer could not fit into the KV memory even alone.
        """
        check_tokens(token_ids, params, self._vocab_size)
        for name in EVICTION_FIELDS:
            # What is said of the prompt's end alone asks for nothing.
            if name not in ("template_tail", "answer_prefix") and getattr(params, name) not in (
                None,
                "full",
                (),
            ):
                raise InvalidRequestError(
                    f"{name} needs engine=paged: a padded cache keeps all KVs of a query"
                )
        max_tokens = answer_limit(len(token_ids), params, self._max_model_len)
        # The last token of an answer is never computed, so it needs no KV.
        left = self._budget.max_columns - len(token_ids) + 1
        if left < max(params.num_forced, 1) or (params.max_tokens is not None and max_tokens > left):
            raise CapacityError(
                f"prompt of {len(token_ids)} tokens with max_tokens {max_tokens} needs room for "
                f"{len(token_ids) + max_tokens - 1} KVs, kv_memory {format_bytes(self._budget.kv_memory)} holds "
                f"{self._budget.max_columns}"
            )
        return min(max_tokens, left)
