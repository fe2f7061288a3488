"""Drafts of an assistant that has no KVs of its own: it reads those of the model that answers (Gemma 4)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from winnow.engine.requests.request import Sequence
from winnow.executor.draft_model import without_form
from winnow.executor.hidden_states import HiddenStates
from winnow.executor.torch_executor import TorchExecutor
from winnow.models import LoadedModel
from winnow.sampling import Sampler

if TYPE_CHECKING:
    from winnow.models.load.drafts import Assistant


class AssistantDrafts:
    """Source of what an assistant would sample, with the randomness of the target at the same positions.

    It stays at the last token's position, and continues from its own hidden state.
    """

    reads_cache = True
    price = 0.0  # a few small layers

    def __init__(
        self,
        assistant: "Assistant",
        target: LoadedModel,
        executor: TorchExecutor,
        hidden: HiddenStates,
    ) -> None:
        self._assistant, self._target, self._executor, self._hidden = assistant, target, executor, hidden
        self._sampler = Sampler(
            executor.size.max_num_seqs, target.vocab_size, target.device, target.eos_token_ids
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of hidden states."""
        return self._hidden.total_bytes

    def rooms(self, most: Mapping[Sequence, int], context: int) -> Mapping[Sequence, int]:
        return {each: count for each, count in most.items() if self._hidden.holds(each)}

    @torch.inference_mode()
    def propose(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        if not counts:
            return {}
        sequences = list(counts)
        slots = [each.kv.running_slot for each in sequences]
        positions = [each.num_tokens - 1 for each in sequences]
        step, position = self._executor.read_step(slots, positions)
        hidden = torch.cat(
            [self._hidden.read(slot, end - 1, end) for slot, end in zip(slots, positions, strict=True)]
        )
        tokens = [each.token_ids[-1] for each in sequences]
        for slot, each in zip(slots, sequences, strict=True):
            prompt, answer = each.token_ids[: each.prompt_len], each.token_ids[each.prompt_len :]
            self._sampler.add(slot, without_form(each), prompt, answer, each.index)
        try:
            found: list[list[int]] = [[] for _ in sequences]
            for _ in range(max(counts.values())):
                given = torch.tensor(tokens, device=self._target.device)
                logits, hidden = self._assistant.compute(given, hidden, position, step)
                tokens = self._sampler.sample(logits, slots).token_ids
                if not all(0 <= token < self._target.vocab_size for token in tokens):
                    break
                for drafts, token in zip(found, tokens, strict=True):
                    drafts.append(token)
        finally:
            for slot in slots:
                self._sampler.remove(slot)
        return {each: drafts[: counts[each]] for each, drafts in zip(sequences, found, strict=True)}
