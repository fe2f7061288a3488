"""Drafts of another model, over a paged cache of its own in a part of the same memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from winnow.cache import CacheSize, Ledger
from winnow.config import EngineConfig
from winnow.engine.plan import NewSequence, PlannedSequence, StepPlan
from winnow.engine.requests.request import Sequence
from winnow.executor.tensor_parallel import build_executor
from winnow.executor.torch_executor import TorchExecutor
from winnow.models import LoadedModel
from winnow.sampling import SamplingParams


@dataclass
class Held:
    """Tokens of a sequence from `origin` on whose KVs are in the cache, the first `agreed` known to be its own."""

    slot: int
    params: SamplingParams
    origin: int
    token_ids: list[int]
    agreed: int = 0
    again: int = 0  # tokens at the end that the next of several heads computes


Chunks = list[tuple[Sequence, list[int]]]


def without_form(sequence: Sequence) -> SamplingParams:
    """Return how drafts of a sequence are sampled. They follow no form: the target's own choice is what counts."""
    return replace(sequence.request.params, structured_outputs=None, logprobs=None, prompt_logprobs=None)


class DraftModel:
    """Source of what the draft model would sample, with the randomness of the target at the same positions.

    So a sampled answer's drafts are accepted as often as a greedy one's where both models are of one opinion. KVs of a
    sequence are computed when drafts of it are first asked for, from some token on, and dropped when it no longer runs
    or they lack room.
    """

    reads_cache = False

    def __init__(self, loaded: LoadedModel, config: EngineConfig, price: float) -> None:
        self._layout = loaded.kv_layout(config.cache, 1, config.scheduler.chunk)
        seqs = config.scheduler.max_num_seqs
        size = CacheSize.fit(self._layout, config.cache.kv_memory, seqs, loaded.max_model_len)
        self._executor: TorchExecutor = build_executor(loaded, config, self._layout, size)
        self._ledger = Ledger(self._layout, size)
        self._loaded, self.price = loaded, price
        self._context = 0
        self._most = config.scheduler.max_num_batched_tokens
        self._held: dict[Sequence, Held] = {}

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    def rooms(self, most: Mapping[Sequence, int], context: int) -> Mapping[Sequence, int]:
        self._context = context
        for sequence in [each for each in self._held if each.finished or each.kv.slot is None]:
            self._drop(sequence)
        limit = self._loaded.max_model_len
        return {
            each: count
            for each, count in most.items()
            if each.num_tokens + count <= limit and (each in self._held or self._ledger.num_free_slots)
        }

    def propose(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        try:
            return self._propose(counts)
        except BaseException:  # what was computed is not known
            for sequence in list(self._held):
                self._drop(sequence)
            self._ledger.repeat_update()
            raise

    def _propose(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        pending = {each: self._begin(each) for each in counts}
        new = [self._state(each) for each in pending]
        found: dict[Sequence, list[int]] = {each: [] for each in pending}
        while pending:
            chunks = self._with_room(self._chunks(pending, found), pending)
            if not chunks:
                break
            last = {each for each, tokens in chunks if len(tokens) == len(pending[each])}
            sampled = self._compute(chunks, last, new)
            new = []
            for sequence, tokens in chunks:
                pending[sequence] = pending[sequence][len(tokens) :]
            for sequence in last:
                del pending[sequence]
            for sequence, token in sampled.items():
                found[sequence].append(token)
                if len(found[sequence]) < counts[sequence] and token < self._loaded.vocab_size:
                    pending[sequence] = self._following(sequence, token)
        return found

    def _chunks(self, pending: dict[Sequence, list[int]], found: dict[Sequence, list[int]]) -> Chunks:
        chunks, room = Chunks(), self._most
        for sequence, tokens in pending.items():
            if room:
                chunks.append((sequence, tokens[:room]))
                room -= len(chunks[-1][1])
        return chunks

    def _following(self, sequence: Sequence, token: int) -> list[int]:
        return [token]

    def _begin(self, sequence: Sequence) -> list[int]:
        """Take back what the sequence did not become. Returns the tokens that are to be computed, at least one."""
        held = self._held.get(sequence)
        if held is None:
            params, origin = without_form(sequence), self._origin(sequence)
            held = self._held[sequence] = Held(self._ledger.open(), params, origin, [])
        tokens = sequence.token_ids[held.origin :]
        same, most = held.agreed, min(len(held.token_ids), len(tokens) - 1)
        while same < most and held.token_ids[same] == tokens[same]:
            same += 1
        if same < len(held.token_ids):
            self._ledger.take_back([held.slot], [len(held.token_ids) - same])
            del held.token_ids[same:]
        held.agreed = same
        return tokens[same:]

    def _origin(self, sequence: Sequence) -> int:
        return max(sequence.num_tokens - self._context, 0)

    def _state(self, sequence: Sequence) -> NewSequence:
        held = self._held[sequence]
        return NewSequence(held.slot, sequence.token_ids, sequence.prompt_len, held.params, sequence.index)

    def _with_room(self, chunks: Chunks, pending: dict[Sequence, list[int]]) -> Chunks:
        """Take room for chunks; where it lacks, sequences not asked for lose their KVs, and then the last ones."""
        while chunks:
            slots = [self._held[each].slot for each, _ in chunks]
            lengths = [len(tokens) - self._held[each].again for each, tokens in chunks]
            if self._ledger.has_room_for(self._ledger.demand(slots, lengths)):
                self._ledger.append(slots, lengths)
                return chunks
            idle = [each for each in self._held if each not in pending]
            victim = idle[0] if idle else chunks[-1][0]
            if not idle:
                del pending[victim]
                chunks = chunks[:-1]
            self._drop(victim)
        return chunks

    def _compute(self, chunks: Chunks, last: set[Sequence], new: list[NewSequence]) -> dict[Sequence, int]:
        """Compute tokens. Returns what is sampled behind them, of the sequences in `last`."""
        entries = []
        for sequence, tokens in chunks:
            held = self._held[sequence]
            start = len(held.token_ids) - held.again
            samplers = (held.slot,) if sequence in last else ()
            entries.append(PlannedSequence(held.slot, start, tokens, samplers))
            held.token_ids += tokens[held.again :]
        known = {held.slot for held in self._held.values()}
        self._executor.apply(self._ledger.take_update())
        self._executor.restate([each for each in new if each.slot in known])
        result = self._executor.collect(self._executor.submit(StepPlan(tuple(entries))))
        sampling = [each for each, _ in chunks if each in last]
        found = enumerate(zip(sampling, result.token_ids, strict=True))
        return {each: token for index, (each, token) in found if index not in result.errors}

    def _drop(self, sequence: Sequence) -> None:
        self._ledger.close(self._held.pop(sequence).slot)
