"""Drafts of a smaller model of the same vocabulary, over a paged cache of its own in a part of the same memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from winnow.cache import CacheLayout, CacheSize, Ledger
from winnow.config import CacheConfig, EngineConfig, EvictionConfig
from winnow.config.speculative import SpeculativeConfig
from winnow.engine.plan import NewSequence, PlannedSequence, StepPlan
from winnow.engine.requests.request import Sequence
from winnow.errors import ConfigError
from winnow.executor.rank_executor import build_rank
from winnow.executor.torch_executor import TorchExecutor
from winnow.models import LoadedModel, load_model
from winnow.models.load.hub import locate_model
from winnow.models.load.json_files import read_object
from winnow.sampling import SamplingParams

# Tokens of a text by which the memory of two caches is compared.
_COMPARED = 1024


def load_draft_model(config: EngineConfig, target: LoadedModel) -> LoadedModel | None:
    """Load the model that `speculative_config` names, as the target is loaded; None: it names none.

    Raises:
        ConfigError: its vocabulary is another, or it cannot take KVs back.
    """
    options: SpeculativeConfig | None = config.scheduler.speculative_config
    if options is None or options.method != "draft_model":
        return None
    if config.model.tensor_parallel_size > 1:
        raise ConfigError("speculative_config: method draft_model needs tensor_parallel_size 1")
    own = replace(config.model, model=options.model, revision=None, tokenizer=None, max_model_len=None)
    file = locate_model(own) / "config.json"  # a GGUF file has none, and is no assistant
    kind = str(read_object(file).get("model_type")) if file.is_file() else ""
    if kind.endswith("assistant"):
        raise ConfigError(
            f"speculative_config: model {options.model} is a {kind}, which reads the KVs of the model that answers: "
            "only models that answer by themselves can draft"
        )
    loaded = load_model(own)
    if loaded.geometry.states:
        raise ConfigError(
            f"speculative_config: model {options.model} has layers that keep recurrent states, which cannot take "
            "tokens back"
        )
    _check_vocabulary(loaded, target)
    return loaded


def _check_vocabulary(draft: LoadedModel, target: LoadedModel) -> None:
    """Raise ConfigError unless the same token ids stand for the same strings."""
    if draft.tokenizer is None or target.tokenizer is None:
        if draft.vocab_size != target.vocab_size:
            raise ConfigError(
                f"speculative_config: model has {draft.vocab_size} tokens, and the model that answers "
                f"{target.vocab_size}: they must be the same"
            )
        return
    own, others = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    for token in sorted(set(own) | set(others), key=lambda each: (others.get(each, -1), each)):
        if own.get(token) != others.get(token):
            raise ConfigError(
                f"speculative_config: model must have the vocabulary of the model that answers: {token!r} is token "
                f"{own.get(token)} there, and {others.get(token)} here"
            )


def split_memory(
    config: EngineConfig, target: CacheLayout, draft: LoadedModel
) -> tuple[EngineConfig, EngineConfig]:
    """Return the configurations of the target and of its draft model, who share kv_memory as a text takes it."""
    model = replace(config.model, weight_dtype="auto", weight_wide="none")
    cache = CacheConfig(block_size=config.cache.block_size, enable_prefix_caching=False)
    own = draft.kv_layout(cache, 1)
    needs = [each.device_bytes(each.by_kind(each.row_blocks_seen(_COMPARED))) for each in (target, own)]
    whole = config.cache.kv_memory
    if draft.device.type == "cuda" and config.cache.gpu_memory_utilization is not None:
        # It was what the GPU had left beside the target.
        whole -= sum(each.nbytes for each in cast(Any, draft.model).parameters())
    memory = whole * needs[1] // sum(needs)
    scheduler = replace(config.scheduler, speculative_config=None)
    return (
        replace(config, cache=replace(config.cache, kv_memory=whole - memory)),
        EngineConfig(model, replace(cache, kv_memory=memory), scheduler, EvictionConfig()),
    )


@dataclass
class _Held:
    """Tokens of a sequence whose KVs are in the cache, the first `agreed` of them known to be the sequence's."""

    slot: int
    params: SamplingParams
    token_ids: list[int]
    agreed: int = 0


class DraftModel:
    """Source of what the draft model would sample, with the randomness of the target at the same positions.

    So a sampled answer's drafts are accepted as often as a greedy one's where both models are of one opinion. KVs of a
    sequence are computed when drafts of it are first asked for, and dropped when it no longer runs or they lack room.

    Args:
        config: of its memory, and of the size of its steps.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self._layout = loaded.kv_layout(config.cache, 1, config.scheduler.chunk)
        seqs = config.scheduler.max_num_seqs
        size = CacheSize.fit(self._layout, config.cache.kv_memory, seqs, loaded.max_model_len)
        self._executor: TorchExecutor = build_rank(loaded, config, self._layout, size)
        self._ledger = Ledger(self._layout, size)
        self._loaded = loaded
        self._most = config.scheduler.max_num_batched_tokens
        self._held: dict[Sequence, _Held] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of its cache that are in use, tables included."""
        return self._ledger.used_bytes

    def rooms(self, most: Mapping[Sequence, int]) -> Mapping[Sequence, int]:
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
            chunks, room = list[tuple[Sequence, list[int]]](), self._most
            for sequence, tokens in pending.items():
                if room:
                    chunks.append((sequence, tokens[:room]))
                    room -= len(chunks[-1][1])
            chunks = self._with_room(chunks, pending)
            if not chunks:
                break
            last = {each for each, tokens in chunks if len(tokens) == len(pending[each])}
            sampled = self._compute(chunks, last, new)
            new = []
            for sequence, tokens in chunks:
                pending[sequence] = pending[sequence][len(tokens) :]
            for sequence, token in sampled.items():
                found[sequence].append(token)
                del pending[sequence]
                if len(found[sequence]) < counts[sequence] and token < self._loaded.vocab_size:
                    pending[sequence] = [token]
        return found

    def _begin(self, sequence: Sequence) -> list[int]:
        """Take back what the sequence did not become. Returns the tokens that are to be computed, at least one."""
        tokens, held = sequence.token_ids, self._held.get(sequence)
        if held is None:
            # Drafts follow no form: the target's own choice is what counts.
            params = replace(
                sequence.request.params, structured_outputs=None, logprobs=None, prompt_logprobs=None
            )
            held = self._held[sequence] = _Held(self._ledger.open(), params, [])
        same, most = held.agreed, min(len(held.token_ids), len(tokens) - 1)
        while same < most and held.token_ids[same] == tokens[same]:
            same += 1
        if same < len(held.token_ids):
            self._ledger.take_back([held.slot], [len(held.token_ids) - same])
            del held.token_ids[same:]
        held.agreed = same
        return tokens[same:]

    def _state(self, sequence: Sequence) -> NewSequence:
        held = self._held[sequence]
        return NewSequence(held.slot, sequence.token_ids, sequence.prompt_len, held.params, sequence.index)

    def _with_room(
        self, chunks: list[tuple[Sequence, list[int]]], pending: dict[Sequence, list[int]]
    ) -> list[tuple[Sequence, list[int]]]:
        """Take room for chunks; where it lacks, sequences not asked for lose their KVs, and then the last ones."""
        while chunks:
            slots = [self._held[each].slot for each, _ in chunks]
            lengths = [len(tokens) for _, tokens in chunks]
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

    def _compute(
        self, chunks: list[tuple[Sequence, list[int]]], last: set[Sequence], new: list[NewSequence]
    ) -> dict[Sequence, int]:
        """Compute tokens. Returns what is sampled behind them, of the sequences in `last`."""
        entries = []
        for sequence, tokens in chunks:
            held = self._held[sequence]
            start = len(held.token_ids)
            samplers = (held.slot,) if sequence in last else ()
            entries.append(PlannedSequence(held.slot, start, tokens, samplers))
            held.token_ids += tokens
        known = {held.slot for held in self._held.values()}
        self._executor.apply(self._ledger.take_update())
        self._executor.restate([each for each in new if each.slot in known])
        result = self._executor.collect(self._executor.submit(StepPlan(tuple(entries))))
        sampling = [each for each, _ in chunks if each in last]
        return {
            each: token
            for index, (each, token) in enumerate(zip(sampling, result.token_ids, strict=True))
            if index not in result.errors
        }

    def _drop(self, sequence: Sequence) -> None:
        self._ledger.close(self._held.pop(sequence).slot)
