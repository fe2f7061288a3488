"""Sources of drafts from a model's last hidden states: those of its own heads, and of an assistant."""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from winnow.cache import CacheLayout
from winnow.config import EngineConfig
from winnow.engine.plan import NewSequence
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.drafts import DraftSource
from winnow.errors import ConfigError
from winnow.executor.draft_model import Chunks, DraftModel, without_form
from winnow.executor.draft_sources import config_of, is_assistant, less, price_of, split_memory
from winnow.executor.torch_executor import TorchExecutor
from winnow.models import LoadedModel
from winnow.models.load.hub import locate_model
from winnow.sampling import Sampler
from winnow_drafts.hidden_states import HiddenStates, hidden_size
from winnow_drafts.models import Assistant, DraftHeads, load_heads

# Hidden states of a sequence that are kept, at most and in any case, and the part of the memory that they take at most.
_MOST_STATES, _LEAST_STATES, _STATES_PART = 256, 8, 8


class AssistantDrafts:
    """Source of what an assistant would sample, with the randomness of the target at the same positions. It stays at
    the last token's position, and continues from its own hidden state."""

    reads_cache = True
    price = 0.0  # a few small layers

    def __init__(
        self, assistant: Assistant, target: LoadedModel, executor: TorchExecutor, hidden: HiddenStates
    ) -> None:
        self._assistant, self._target, self._executor, self._hidden = assistant, target, executor, hidden
        self.used_bytes = hidden.total_bytes
        seqs = executor.size.max_num_seqs
        self._sampler = Sampler(seqs, target.vocab_size, target.device, target.eos_token_ids)

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
        places = zip(slots, positions, strict=True)
        hidden = torch.cat([self._hidden.read(slot, end - 1, end) for slot, end in places])
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


class HeadDrafts(DraftModel):
    """Source of what the model's own heads would sample: each token goes with the hidden state of the one before it.

    Their KVs of a sequence begin with the tokens whose hidden states are still held as drafts are first asked for. KVs
    that depend on drafts are dropped at once. One head continues from its own states; of several, each says one
    token more, from the states of the one before it.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, price: float, hidden: HiddenStates) -> None:
        super().__init__(loaded, config, price)
        self._executor.leave_graphs()  # they would repeat the hidden states, too
        self._heads = cast(DraftHeads, loaded.model)
        self._count = self._heads.num_mtp_layers
        self._hidden = hidden
        self._last: dict[Sequence, list[int]] = {}  # tokens computed last, and the states made of them
        self._states: dict[Sequence, Tensor] = {}

    def rooms(self, most: Mapping[Sequence, int], context: int) -> Mapping[Sequence, int]:
        many = max(most.values(), default=0) if self._count == 1 else self._count
        held = {each: min(count, many) for each, count in most.items() if self._hidden.holds(each)}
        return super().rooms(held, context)

    @property
    def used_bytes(self) -> int:
        return super().used_bytes + self._hidden.total_bytes

    def _origin(self, sequence: Sequence) -> int:
        return max(self._hidden.held(sequence.kv.running_slot)[0] + 1, super()._origin(sequence))

    def _begin(self, sequence: Sequence) -> list[int]:
        held = self._held.get(sequence)
        if held is not None and held.origin + held.agreed <= self._hidden.held(sequence.kv.running_slot)[0]:
            self._drop(sequence)  # states between are lost
        return super()._begin(sequence)

    def _propose(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        # Each of several heads needs the KVs of all tokens.
        wanted = counts if self._count == 1 else {each: self._count for each in counts}
        self._last, self._states = {}, {}
        found = super()._propose(wanted)
        for sequence in found:
            held = self._held.get(sequence)
            if held is None:
                continue
            if self._count > 1 and len(found[sequence]) < self._count:
                self._drop(sequence)
                continue
            known = max(sequence.num_tokens - held.origin - self._count + 1, 0)
            if len(held.token_ids) > known:
                self._ledger.take_back([held.slot], [len(held.token_ids) - known])
                del held.token_ids[known:]
            held.agreed, held.again = len(held.token_ids), 0
        return {each: drafts[: counts[each]] for each, drafts in found.items()}

    def _chunks(self, pending: dict[Sequence, list[int]], found: dict[Sequence, list[int]]) -> Chunks:
        if self._count == 1:
            self._heads.depth = 0
            return super()._chunks(pending, found)
        self._heads.depth = depth = len(found[next(iter(pending))])
        chunks, room = Chunks(), max(self._most, self._hidden.window)
        for sequence, tokens in pending.items():
            if len(found[sequence]) == depth and len(tokens) <= room:
                chunks.append((sequence, tokens))
                room -= len(tokens)
        return chunks

    def _following(self, sequence: Sequence, token: int) -> list[int]:
        if self._count == 1:
            return [token]
        held = self._held[sequence]
        held.again = len(self._states[sequence])
        return [*self._last[sequence][1:], token]

    def _compute(self, chunks: Chunks, last: set[Sequence], new: list[NewSequence]) -> dict[Sequence, int]:
        states = []
        for sequence, tokens in chunks:
            held = self._held[sequence]
            first = held.origin + len(held.token_ids) - 1
            if not held.again and first + 1 < sequence.num_tokens:
                states.append(self._hidden.read(sequence.kv.running_slot, first, first + len(tokens)))
            else:
                states.append(self._states[sequence])
        self._heads.previous = torch.cat(states)
        sampled = super()._compute(chunks, last, new)
        parts = self._heads.outputs.split([len(tokens) for _, tokens in chunks])
        for (sequence, tokens), part in zip(chunks, parts, strict=True):
            self._states[sequence] = part if self._count > 1 else part[-1:]
            self._last[sequence] = tokens
        return sampled


def open_drafts(
    config: EngineConfig, target: LoadedModel, layout: CacheLayout
) -> tuple[EngineConfig, Callable[[TorchExecutor], DraftSource]]:
    """Load heads or an assistant. Returns the target's configuration, less the memory that drafts take, and what opens
    their source beside the target's executor. Raises ConfigError: there are no heads, or it is no assistant."""
    options, seqs = config.scheduler.speculative_config, config.scheduler.max_num_seqs
    assert options is not None, "drafts were asked for"
    if options.model is None:
        heads = load_heads(config.model, target)
        parts = cast(DraftHeads, heads.model)
        price = price_of(target, parts.layers, parts.shared_head)
        window, nbytes = _window(config, target)
        own, of_draft = split_memory(config, layout, heads, nbytes)
        return own, lambda executor: HeadDrafts(
            heads, of_draft, price, executor.keep_hidden(HiddenStates(target, seqs, window))
        )
    if not is_assistant(config, options):
        raise ConfigError(
            f"speculative_config: model must be an assistant with method mtp, got {options.model}: with method "
            "draft_model any model of the same vocabulary can draft"
        )
    assistant = Assistant(locate_model(config_of(config, options)), target)
    window = 2 + options.num_speculative_tokens  # all that a step may take back, and one
    nbytes = window * seqs * hidden_size(target) * target.dtype.itemsize
    return less(config, nbytes), lambda executor: AssistantDrafts(
        assistant, target, executor, executor.keep_hidden(HiddenStates(target, seqs, window))
    )


def _window(config: EngineConfig, target: LoadedModel) -> tuple[int, int]:
    """Return how many hidden states of each sequence are kept, and the bytes of all."""
    token = config.scheduler.max_num_seqs * hidden_size(target) * target.dtype.itemsize
    window = max(min(_MOST_STATES, config.cache.kv_memory // (_STATES_PART * token)), _LEAST_STATES)
    return window, window * token
