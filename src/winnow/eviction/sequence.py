"""A policy bound to one sequence: when its rounds run, and how many blocks it may hold. Host arithmetic only."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from winnow.attention import AttentionObserver
from winnow.cache import CacheLayout
from winnow.cache.cache_size import ROW_SKEW
from winnow.cache.layout import ceil_div
from winnow.eviction.policy import EvictionPolicy
from winnow.eviction.replay import ReplayPass
from winnow.values.images import cut_run

# Most tokens that a sequence under a pressure policy computes at once after its prompt; admission reserves room.
_PRESSURE_STEP = 64
LATE_STEPS = (2.0, 4.0)
"""Compressions before the policy's own that rounds of a policy with `When.late` may stop at."""


@dataclass(frozen=True)
class SequenceEviction:
    """A policy bound to one prompt. Token counts are per sequence, KV counts per row on average.

    Rows are those of the layers that policies evict from (`CacheLayout.evictable`), except where blocks are
    counted.
    """

    policy: EvictionPolicy
    budget: int
    """KVs per row, on average over the rows that the policy evicts from."""
    prompt_len: int
    context_len: int
    """Tokens of the prompt that its rounds may evict; the rest, such as a question, is kept whole."""
    spans: tuple[tuple[int, int], ...] = ()
    """Positions to protect, half-open; a template's tail is one of them."""
    template_tail: int = 0
    """Tokens at the context's end that follow the question: what a chat template ends with, and an answer's prefix."""
    passes: tuple[ReplayPass, ...] = ()
    """Replay passes that run behind the context before its round, one by one; the KVs of each are dropped."""
    uncut: tuple[tuple[int, int], ...] = ()
    """Runs of tokens within which there is no round (`PromptImage.two_way`): it comes behind them."""
    prefill_budget: int | None = None
    """KVs per row that rounds within the prompt leave (`When.prefill_compression`); None: `budget`."""
    first_budget: int | None = None
    """KVs per row that the round after the prompt leaves under a late policy, at least `budget`, which rounds that
    make room go down to; None: no round follows the prompt because it ended."""

    @property
    def _step(self) -> int:
        return self.policy.when.prefill_every or 0

    @property
    def _most_step(self) -> int:
        return self._step and self._step + max((end - start for start, end in self.uncut), default=0)

    @property
    def target(self) -> int:
        return self.budget - self._step if self.policy.when.within else self.budget

    def target_at(self, computed: int) -> int:
        """Return KVs per row that a round leaves when `computed` tokens are computed."""
        return self.prefill_target if computed < self.context_len else self.target

    @property
    def prefill_target(self) -> int:
        return self.target if self.prefill_budget is None else self.prefill_budget

    def at(self, compression: float) -> "SequenceEviction":
        """Return the same with a budget of one KV for `compression` tokens of the context, at least its own budget."""
        return replace(self, budget=max(self.budget, ceil(self.context_len / compression)))

    @property
    def first(self) -> "SequenceEviction":
        """The same with the budget of the round after the prompt."""
        return self if self.first_budget is None else replace(self, budget=self.first_budget)

    @property
    def limit(self) -> int:
        """KVs per row at which a prompt with rounds needs one before its next tokens."""
        return self.budget if self.policy.when.within else self.prefill_target + self._step

    @property
    def recent(self) -> int:
        return self.policy.keep.window(self.target)

    @property
    def longest_pass(self) -> int:
        return max((each.length for each in self.passes), default=0)

    @property
    def question_end(self) -> int:
        """Tokens of the context up to the question's last one; windows and recent KVs of its rounds end there."""
        return self.context_len - self.template_tail

    def recent_at(self, computed: int) -> int:
        """Return the number of last positions that a round protects when `computed` tokens are computed."""
        behind = computed - self.question_end
        return self.recent + behind if 0 < behind <= self.template_tail else self.recent

    @property
    def num_protected(self) -> int:
        """KVs per row that no round may evict, in a sequence of the context's length."""
        last = range(max(self.question_end - self.recent, 0), self.context_len)
        kept = set(range(min(self.policy.keep.sinks, self.context_len))).union(last)
        return len(kept.union(*(range(*span) for span in self.spans)))

    # -- when rounds run -----------------------------------------------------------------------------------------
    # Determined by policy and prompt alone, so that the kept set does not depend on other requests.

    def tokens_to_round(self, computed: int, last_round: int, mean_kvs: float) -> int | None:
        """Return tokens that may be computed before the next round may be due, at least 1; None: no limit.

        Tokens computed include those whose KVs earlier rounds evicted; `last_round` is their number then, or 0.
        """
        if computed < self.context_len:
            return self._round_end(computed) - computed
        if computed < self.prompt_len:
            return self.prompt_len - computed
        when = self.policy.when
        if when.decode_every is None:
            # A round under pressure may come at any time, so recomputation proceeds in small chunks.
            return _PRESSURE_STEP if when.pressure else None
        over = int(self.target - mean_kvs) + 1
        if when.within:
            return max(self.limit - int(mean_kvs), 1)
        return max(when.decode_every - (computed - max(last_round, self.prompt_len)), over, 1)

    def _round_end(self, computed: int) -> int:
        """Return the token count of the context's next round, or of its end, after `computed` tokens."""
        return min(self.context_len, self._prefill_stop(computed))

    def _observed_end(self, computed: int) -> int:
        """End of the queries that the next round observes. A chunk ends there."""
        end = self._round_end(computed)
        return end if self.policy.score.window is None else min(end, max(self.question_end, computed))

    def _prefill_stop(self, computed: int) -> int:
        if not self._step:
            return self.context_len
        run = cut_run(self.uncut, computed)
        computed = computed if run is None else run[0]
        stop = self.limit
        if computed >= stop:
            stop = computed + self._step - (computed - self.limit) % self._step
        return self._uncut_end(stop)

    def _uncut_end(self, stop: int) -> int:
        run = cut_run(self.uncut, stop)
        return stop if run is None else run[1]

    def round_due(self, computed: int, last_round: int, mean_kvs: float) -> bool:
        """Return whether a round is due before the next tokens. Arguments as above."""
        if self.first_budget is not None and computed == self.context_len:
            return computed != last_round and mean_kvs > self.first_budget
        if computed == last_round or mean_kvs <= self.target_at(computed):
            return False
        when = self.policy.when
        if computed == self.context_len and when.after_prefill:
            return True
        if computed < self.context_len:
            return self._step > 0 and computed == self._prefill_stop(computed - 1)
        if computed < self.prompt_len or when.decode_every is None:
            return False
        if when.within:
            return mean_kvs >= self.limit
        return computed - max(last_round, self.prompt_len) >= when.decode_every

    def may_shrink(self, computed: int, last_round: int, mean_kvs: float, *, urgent: bool = False) -> bool:
        """Return whether a round under pressure or at engine intervals would evict anything.

        Under a late policy: as many KVs per row as make a round worth its time, unless it is `urgent`.
        """
        least = _PRESSURE_STEP if self.policy.when.late and not urgent else 0
        return computed >= self.prompt_len and computed != last_round and mean_kvs > self.target + least

    def chunk(self, computed: int, last_round: int, mean_kvs: float, wanted: int, most: int) -> int:
        """Return tokens to compute now out of `wanted`, at most `most`; 0: wait for a step with more room.

        A chunk ends where a round may be due, and at the question's end if an observation window ends there. The last
        chunk before such an end contains the whole window.
        """
        ahead = self.tokens_to_round(computed, last_round, mean_kvs)
        window = self.policy.score.window
        observes = window is not None and computed < self.question_end
        if observes:
            ahead = self._observed_end(computed) - computed
        left = wanted if ahead is None else min(wanted, ahead)
        if left <= most or window is None or not observes:
            return min(left, most)
        return max(min(most, left - window), 0)

    @property
    def num_shareable(self) -> int:
        """Tokens of the prompt that may be found computed: no round or query that adds to accumulators comes before."""
        policy = self.policy
        if policy.score.needs.probes:
            return 0
        if policy.observes[False] is None:
            return max(self._round_end(0) - 1, 0)
        window = policy.score.window
        return 0 if window is None else max(self._observed_end(0) - window, 0)

    def snapshots(self) -> Iterator[tuple[int, "SequenceEviction"]]:
        """Yield the rounds whose outcome other prompts share that begin alike, the last one first.

        Each is the tokens computed, and what the KVs then follow from besides these: the same for all that share them.
        Rounds within the prompt are spaced so that their snapshots take no more memory than its KVs did. All follows
        from policy and prompt, so that who looks for a snapshot knows where to look.
        """
        policy = self.policy
        # What the engine learnt of the context's queries is no part of a snapshot; after the last round it is useless.
        is_known = not (policy.score.needs.probes and policy.when.in_decode)
        if policy.when.after_prefill and self.context_len < self.prompt_len and is_known:
            yield self.context_len, self.rule_at(self.context_len)
        if not self._step or policy.score.needs.probes:
            return
        apart = self._step * ceil_div(self.prefill_target, self._step)
        last = min(self.question_end, self.context_len - 1, self.prompt_len - 1)
        ends = {self._uncut_end(computed) for computed in range(self.limit, last + 1, apart)}
        for computed in sorted((end for end in ends if end <= last), reverse=True):
            spans = tuple(span for span in self.spans if span[0] < computed)
            rule = self.rule_at(computed)
            yield computed, replace(rule, context_len=0, template_tail=0, spans=spans, passes=())

    def rule_at(self, computed: int) -> "SequenceEviction":
        """Return what KVs left by the round after `computed` tokens follow from besides these tokens."""
        uncut = tuple(run for run in self.uncut if run[0] < computed)
        return replace(self, prompt_len=0, uncut=uncut)

    def may_observe(self, computed: int, most: int) -> bool:
        """Return whether queries of the next tokens, `most` of them or fewer, may add to accumulators."""
        if self.policy.observes[computed >= self.context_len] is None:
            return False
        if computed >= self.context_len or self.policy.score.window is None:
            return True
        return computed + most >= self._observed_end(computed)

    def replaces_accumulators(self, computed: int) -> bool:
        """Return whether queries of the next tokens, where they count, overwrite every accumulator of their rows."""
        observe = self.policy.observes[computed >= self.context_len]
        return observe is not None and observe.replace

    # -- what is observed ----------------------------------------------------------------------------------------

    def observe(self, start: int, end: int) -> tuple[AttentionObserver | None, int]:
        """Return the observer of the queries of tokens start..end - 1, and the first of them that it counts."""
        score = self.policy.score
        decoding = start >= self.context_len
        observe = self.policy.observes[decoding]
        if score.window is None or observe is None or (decoding and not observe.replace):
            return observe, start
        if not decoding and (start >= self.question_end or end != self._observed_end(start)):
            return None, start  # no round follows this chunk, or it uses earlier queries
        return observe, max(end - score.window, start)

    # -- upper bounds on blocks ----------------------------------------------------------------------------------

    def peak_blocks(self, layout: CacheLayout, num_tokens: int) -> int:
        """Return an upper bound on blocks held while the first `num_tokens` tokens are computed."""
        rows, windowed = self._parts(layout, num_tokens)
        context = min(num_tokens, self.context_len)
        if context == self.context_len:
            context += self.longest_pass
        prefill = rows.blocks_for(context)
        if self._step:
            within = self if self.prefill_budget is None else replace(self, budget=self.prefill_budget)
            prefill = within._blocks_above_target(rows, self._most_step, context)
        if num_tokens <= self.context_len:
            return windowed + prefill
        return max(windowed + prefill, self.decode_blocks(layout, num_tokens))

    def decode_blocks(self, layout: CacheLayout, num_tokens: int) -> int:
        """Return an upper bound on blocks held from the context's end until the sequence has `num_tokens` tokens."""
        rows, windowed = self._parts(layout, num_tokens)
        return windowed + self._blocks_above_target(rows, self._most_added(num_tokens), num_tokens)

    def blocks_after(self, layout: CacheLayout, num_tokens: int) -> int:
        rows, windowed = self._parts(layout, num_tokens)
        return windowed + self._blocks_left(rows, 0, num_tokens)

    def _parts(self, layout: CacheLayout, num_tokens: int) -> tuple[CacheLayout, int]:
        """Return the rows that the policy evicts from, and most blocks of the others."""
        return layout.evictable_part, layout.windowed_blocks(num_tokens, self.longest_pass)

    def _most_added(self, num_tokens: int) -> int:
        """Return an upper bound on tokens per row above the target at any time after the context."""
        when = self.policy.when
        # Without a round at its end, the context may leave a whole step above the target.
        above = 0 if when.after_prefill else self._most_step
        grown = above + num_tokens - self.context_len
        question = self.prompt_len - self.context_len
        if when.within:
            return min(grown, self._most_step + question)
        every = when.decode_every or (_PRESSURE_STEP if when.pressure else None)
        return grown if every is None else min(grown, above + question + every)

    def _blocks_above_target(self, layout: CacheLayout, added: int, num_tokens: int) -> int:
        """Return blocks of a sequence of `num_tokens` tokens, `added` of them per row since the last round."""
        when = self.policy.when
        if not (when.after_prefill or when.late or self._step):
            return layout.blocks_for(num_tokens)
        # Below the target there is no round and rows are equal: each may waste almost a block.
        before = layout.blocks_for(min(num_tokens, self.target + added))
        return max(before, self._blocks_left(layout, added, num_tokens))

    def _blocks_left(self, layout: CacheLayout, added: int, num_tokens: int) -> int:
        """Return `_blocks_above_target` after at least one round."""
        whole, budget = layout.blocks_for(num_tokens), self.policy.budget
        if budget.equal_rows:
            return layout.blocks_for(min(num_tokens, self.target + added))
        # One rank's heads may keep all of it: its stack has to do, which counts in proportion.
        left = budget.blocks_after(layout, self.target, self.num_protected) * layout.ranks
        return min(whole, left + layout.rows_per_seq * ceil_div(added, layout.block_size))

    def longest_row(self, layout: CacheLayout, num_tokens: int) -> int:
        """Return the expected length in KVs of the longest row while `num_tokens` tokens are computed."""
        rows, windowed = self._parts(layout, num_tokens)
        others = layout.rows_per_seq - rows.rows_per_seq
        return max(self._longest_evicted(num_tokens), windowed * layout.block_size // max(others, 1))

    def _longest_evicted(self, num_tokens: int) -> int:
        if not self._step:
            return max(num_tokens, self.context_len + self.longest_pass) if self.passes else num_tokens
        limit = self.limit + self._most_step - self._step
        return min(num_tokens, limit if self.policy.budget.equal_rows else limit * ROW_SKEW)
