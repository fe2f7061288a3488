"""Sampler: from logits to tokens, for a whole batch at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.errors import InvalidRequestError
from winnow.sampling.counts import TokenCounts
from winnow.sampling.filters import draw, keep_min_p, open_argmax, open_greedy, open_keep_top, scale
from winnow.sampling.grammar import AnswerMatcher, GrammarCompiler
from winnow.sampling.logprobs import logprob_table
from winnow.sampling.params import SamplingParams
from winnow.sampling.randomness import stream_key, words
from winnow.sampling.rows import Fault, HostCopy, clean_rows, mark_faults
from winnow.sampling.sampler_output import SamplerOutput, accepted, merged, read_tables, separate_faults
from winnow.sampling.slots import NUM_COLUMNS, Block, Columns, Feature, SlotTable


@dataclass(frozen=True)
class PendingSample:
    """One step's tokens, chosen and perhaps still on their way from the device."""

    read: Callable[[], SamplerOutput]  # waits for them
    slots: list[int]  # [B], in the order of the rows of `tables`
    tables: list[Tensor]  # [R, ...] each; their first columns are the tokens, or faults below 0

    def on_device(self) -> Tensor:
        """Return the tokens of `slots`, int64 [B], where they were chosen; any token in rows with a fault."""
        return torch.cat([table[:, 0] for table in self.tables]).long().clamp(min=0)


class Sampler:
    """Sampler of the next token of every running sequence.

    A sequence occupies a slot from `add` to `remove`. The rules, in order: logit bias, `min_tokens`, the form of
    the answer, repetition, frequency and presence penalty, then for rows that are not greedy temperature, min-p, top-k,
    top-p and the draw. Where the request forces a token, that one is taken instead and counts as if sampled.

    Rows of equal needs are worked on together, so a feature costs only the rows that use it, and what a row gets
    depends on no other. Randomness is a function of the request's seed, the sample's index and the position in the
    answer. So a seeded request gets the same tokens alone, in any batch, in any slot and after a preemption, given the
    same logits.

    Ties: greedy takes the lowest token id; top-k and top-p keep every token as probable as the last one kept. A row
    that holds NaN or +inf, or in which no token is possible, gives none: `SamplerOutput.faults` says why.

    Args:
        eos_token_ids: tokens that end an answer unless the request ignores them, below `vocab_size`.
        seed: source of the seeds of requests that bring none.
        grammars: compiles the forms of answers; None: no request asks for one.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: frozenset[int],
        seed: int = 0,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        assert all(0 <= token < vocab_size for token in eos_token_ids), "end tokens outside the vocabulary"
        self.vocab_size = vocab_size
        self.device = device
        self._slots = SlotTable(max_num_seqs, vocab_size, eos_token_ids)
        self._counts = TokenCounts(vocab_size, device)
        self._argmax, self._greedy = open_argmax(device), open_greedy(device)
        self._keep_top = open_keep_top(device)
        self._seed_key = np.array([stream_key(seed, 0)], dtype=np.uint64)
        self._seeds_drawn = 0
        self._grammars = grammars
        self._matchers: dict[int, AnswerMatcher] = {}

    @property
    def nbytes(self) -> int:
        """Device memory held between steps: the counts of requests with a penalty."""
        return self._counts.nbytes

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        """Return the same parameters, with a seed drawn if they bring none. Call it once when a request arrives: then
        its answers do not depend on when they are preempted."""
        return params if params.seed is not None else replace(params, seed=self._draw_seed())

    def _draw_seed(self) -> int:
        word = words(self._seed_key, np.array([self._seeds_drawn]))
        self._seeds_drawn += 1
        return int(word[0] >> np.uint64(1))

    @torch.inference_mode()
    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        sample_index: int = 0,
    ) -> None:
        """Let a sequence in, new or coming back from preemption with what it has answered so far.

        Parameters without a seed get a fresh one here, also when the sequence comes back; see `with_seed`. Raises
        InvalidRequestError: a token id is outside the vocabulary; the slot stays free.
        """
        assert self._slots.is_free(slot), f"slot {slot} is taken"
        params.validate_for(self.vocab_size)
        counts_row = None
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            counts_row = self._counts.acquire(prompt_token_ids, output_token_ids)
        seed = self._draw_seed() if params.seed is None else params.seed
        key, forced = stream_key(seed, sample_index), params.forced_for(sample_index)
        try:
            if params.structured_outputs is not None:
                self._matchers[slot] = self._new_matcher(params, output_token_ids)
            self._slots.add(slot, params, key, len(output_token_ids), counts_row, forced, output_token_ids)
        except BaseException:
            self._matchers.pop(slot, None)
            if counts_row is not None:
                self._counts.release(counts_row)
            raise

    def _new_matcher(self, params: SamplingParams, output_token_ids: Sequence[int]) -> AnswerMatcher:
        if self._grammars is None or params.form is None:
            raise InvalidRequestError("structured_outputs are not served here")
        matcher = self._grammars.matcher(params.form)
        matcher.take_all(output_token_ids)
        return matcher

    def remove(self, slot: int) -> None:
        assert not self._slots.is_free(slot), f"slot {slot} is free"
        counts_row = self._slots.counts_row(slot)
        if counts_row is not None:
            self._counts.release(counts_row)
        self._matchers.pop(slot, None)
        self._slots.remove(slot)

    def sample(self, logits: Tensor, slots: Sequence[int]) -> SamplerOutput:
        """Return the next token of each slot; see `begin`."""
        return self.begin(logits, slots).read()

    @torch.inference_mode()
    def begin(
        self, logits: Tensor, slots: Sequence[int], drafts: Sequence[Sequence[int]] = ()
    ) -> PendingSample:
        """Choose the next token of each slot; every answer is one token longer afterwards.

        Where tokens are proposed to follow, a slot has a row of logits for its next token and one behind each of its
        drafts. It gets the tokens that it would get one step after the other: as long as what is sampled is the draft,
        the next row counts. Slots with a penalty, a form or bad words are sampled one row after the other.

        One transfer to the device before the work, one from it afterwards, for which only `PendingSample.read` waits.
        An answer in a form must be read before its slot is sampled again.

        Args:
            logits: [B, V] on the sampler's device, any float type; left unchanged.
            slots: [B] distinct slots in use; row i belongs to slot `slots[i]`.
            drafts: [B] tokens proposed for each; empty: none are for any.
        """
        assert len(set(slots)) == len(slots), "a slot can only be sampled once per step"
        if drafts:
            return self._begin_drafted(logits, slots, drafts)
        return self._begin(logits, slots, self._slots.positions(np.array(slots, dtype=np.int64)))

    def _begin_drafted(
        self, logits: Tensor, slots: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> PendingSample:
        """Choose as `begin`, which counts a token of each slot; reading counts what more was accepted."""
        counts = np.array([1 + len(draft) for draft in drafts])
        firsts = np.cumsum(counts) - counts
        walked = {
            index: (slots[index], int(firsts[index]), drafts[index])
            for index in range(len(slots))
            if drafts[index] and self._depends_on_answer(slots[index])
        }
        found = self._walk(logits, walked) if walked else {}
        others = [index for index in range(len(slots)) if index not in walked]
        rest = np.array([slots[index] for index in others], dtype=np.int64)
        rows = np.repeat(rest, counts[others])
        of_rows = np.array([firsts[i] + at for i in others for at in range(counts[i])], dtype=np.int64)
        ahead = of_rows - np.repeat(firsts[others], counts[others])
        own = logits if not walked else logits[torch.from_numpy(of_rows).to(logits.device)]
        pending = self._begin(own, rows.tolist(), self._slots.positions(rows) + ahead)

        def read() -> SamplerOutput:
            output = accepted(pending.read(), [drafts[index] for index in others])
            assert output.offsets is not None, "drafts make it ragged"
            self._slots.advance(rest, np.diff(output.offsets) - 1)
            return output if not walked else merged(output, others, found)

        return PendingSample(read, pending.slots, pending.tables)

    def _depends_on_answer(self, slot: int) -> bool:
        penalised = self._slots.counts_row(slot) is not None
        return penalised or slot in self._matchers or self._slots.has_bad_words(slot)

    def _walk(
        self, logits: Tensor, walked: Mapping[int, tuple[int, int, Sequence[int]]]
    ) -> dict[int, SamplerOutput]:
        """Sample slots one token after the other as far as it is the draft. `walked` has, by index: slot, first row of
        the logits, drafts."""
        found = {index: SamplerOutput([], []) for index in walked}
        active, depth = list(walked), 0
        while active:
            slots = [walked[index][0] for index in active]
            rows = torch.tensor([walked[index][1] + depth for index in active], device=logits.device)
            positions = self._slots.positions(np.array(slots, dtype=np.int64))
            output, going = self._begin(logits[rows], slots, positions).read(), []
            for row, (index, slot) in enumerate(zip(active, slots, strict=True)):
                draft, own = walked[index][2], found[index]
                if row not in output.faults:
                    own.token_ids.append(output.token_ids[row])
                    own.logprobs.append(output.logprobs[row])
                    if depth < len(draft) and draft[depth] == output.token_ids[row]:
                        going.append(index)
                elif depth:  # its next step finds the fault
                    self._slots.advance(np.array([slot]), -1)
                else:
                    own.token_ids.append(0)
                    own.logprobs.append(None)
                    own.faults[0] = output.faults[row]
            active, depth = going, depth + 1
        return found

    def _begin(self, logits: Tensor, slots: Sequence[int], positions: NDArray[np.int64]) -> PendingSample:
        """Choose a token for each row of logits, that at a position, [B], of the answer in its slot."""
        assert logits.shape == (len(slots), self.vocab_size), "one row of logits per token"
        if not slots:
            return PendingSample(lambda: SamplerOutput([], []), [], [])
        rows = np.array(slots, dtype=np.int64)
        assert self._slots.are_used(rows), "only a slot in use can be sampled"
        if self._slots.need_nothing(rows, positions):
            self._slots.advance(rows)
            tokens, marked = self._greedy(logits)
            return PendingSample(
                lambda: separate_faults(marked(), [None] * len(slots)), list(slots), [tokens[:, None]]
            )
        batch = self._slots.batch(rows, positions)
        packed = self._to_device(batch.packed)
        columns = packed[: NUM_COLUMNS * len(slots)].view(NUM_COLUMNS, len(slots))
        edits = packed[NUM_COLUMNS * len(slots) :].view(3, -1)
        tables = []
        for block in batch.blocks:
            own_columns = Columns(*columns[:, block.first : block.end])
            own_edits = edits[:, block.first_edit : block.end_edit]
            allowed = None
            if Feature.GRAMMAR in block.features:
                allowed = self._allowed(rows[batch.order[block.first : block.end]].tolist())
            tables.append(self._sample_block(logits, block, own_columns, own_edits, allowed))
        self._slots.advance(rows)
        numbers = HostCopy(torch.cat([table.flatten() for table in tables]))

        def read() -> SamplerOutput:
            output = read_tables(numbers.read().numpy(), batch)
            for row, slot in enumerate(slots):
                if row in output.faults:
                    continue
                if slot in self._matchers:
                    self._matchers[slot].take(output.token_ids[row])
                if self._slots.has_bad_words(slot):
                    self._slots.take(slot, output.token_ids[row])
            return output

        return PendingSample(read, rows[batch.order].tolist(), tables)

    def _allowed(self, slots: Sequence[int]) -> Tensor:
        masks = np.stack([self._matchers[slot].allowed() for slot in slots])
        return torch.from_numpy(masks).to(self.device)

    def _to_device(self, packed: NDArray[np.float64]) -> Tensor:
        host = torch.from_numpy(packed)
        if self.device.type == "cuda":  # from pinned memory the copy need not wait for the model's kernels
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    def _sample_block(
        self, logits: Tensor, block: Block, columns: Columns, edits: Tensor, allowed: Tensor | None
    ) -> Tensor:
        """Return tokens [R, 1], or with logprobs the table [R, 3 + 2 * top] that starts with them; float64.

        A row with a fault has that in place of its token. `allowed`, bool [R, V], are the tokens that the rows' forms
        leave; None: they have none.
        """
        needs = block.features
        own = logits.index_select(0, columns.row.long())
        if not needs:
            return mark_faults(self._argmax(own), own)[:, None].double()
        x = clean_rows(own)
        raw = x.log_softmax(1) if Feature.LOGPROBS in needs else None
        tokens, left = columns.forced.long(), None
        if Feature.FORCED not in needs:
            tokens, left = self._choose(x, block, columns, edits, allowed)
        if Feature.PENALTIES in needs:
            self._counts.record(columns.counts_row.long(), tokens)
        table = tokens[:, None].double() if raw is None else logprob_table(raw, tokens, block.top)
        if left is not None:
            tokens = torch.where(left, tokens, Fault.NOTHING_LEFT.value)
        table[:, 0] = mark_faults(tokens, own)
        return table

    def _choose(
        self, x: Tensor, block: Block, columns: Columns, edits: Tensor, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return tokens [R] int64 that the rules lead to; the logits `x` [R, V] are used up.

        Also whether anything was possible, bool [R]; None: no rule could rule out everything.
        """
        needs, left = block.features, None
        if needs & (Feature.BIAS | Feature.MIN_TOKENS):
            row, token, change = edits
            x.index_put_((row.long(), token.long()), change.float(), accumulate=True)
        if allowed is not None:
            x.masked_fill_(~allowed, -torch.inf)
        if needs & (Feature.BIAS | Feature.MIN_TOKENS | Feature.GRAMMAR):
            left = x.amax(1) > -torch.inf
        if Feature.PENALTIES in needs:
            penalties = (columns.repetition, columns.frequency, columns.presence)
            counts_row = columns.counts_row.long()
            self._counts.penalise(x, counts_row, *(penalty.float()[:, None] for penalty in penalties))
        return self._draw_filtered(x, block, columns) if Feature.RANDOM in needs else x.argmax(1), left

    def _draw_filtered(self, x: Tensor, block: Block, columns: Columns) -> Tensor:
        scale(x, columns.temperature.float()[:, None])
        if Feature.MIN_P in block.features:
            keep_min_p(x, columns.log_min_p.float()[:, None])
        k = columns.top_k.long() if Feature.TOP_K in block.features else None
        top_p = columns.top_p if Feature.TOP_P in block.features else None
        if k is not None or top_p is not None:
            self._keep_top(x, k, block.largest_k, top_p)
        return draw(x, columns.uniform)
