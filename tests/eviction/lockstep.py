"""Requests in the engine with the dense oracle at their side: how they are made, run and compared."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_model import WORDS, Array, Llama
from dense_oracle import DenseSequence
from dense_state import Row, Stored
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from winnow import LLM, SamplingParams
from winnow.attention import Smoothing
from winnow.cache import KVPool
from winnow.cache.codec import PlainCodec
from winnow.engine.requests.request import Sequence
from winnow.eviction import (
    AdaptiveHeads,
    BelowAverage,
    BySentence,
    Cumulative,
    EqualHeads,
    EvictionPolicy,
    Fixed,
    Pyramid,
    Reconstruction,
    Scorer,
    When,
    Window,
)
from winnow.eviction.scores.factors import Derived
from winnow.executor.torch_executor import TorchExecutor
from winnow.outputs import EngineStats, RequestOutput

ONCE = When(after_prefill=True)
ALWAYS = When(after_prefill=True, prefill_every=8, decode_every=6)
WITHIN = When(prefill_every=8, decode_every=8, within=True)
BLOCK = 4
ANSWERS = 33, 17
# The tokenizer below knows no words of a replay: each is one unknown word.
ASKS = [WORDS.index(WORDS[-1])], [WORDS.index(WORDS[-1])]


# -- what is run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        budget: of its one sample, or of each of several.
        answer: tokens to sample.
    """

    prompt: list[int]
    policy: EvictionPolicy
    budget: int | tuple[int, ...]
    answer: int
    context_len: int | None = None
    spans: tuple[tuple[int, int], ...] = ()
    template_tail: int = 0

    @property
    def budgets(self) -> tuple[int, ...]:
        return self.budget if isinstance(self.budget, tuple) else (self.budget,)

    @property
    def _kv_budget(self) -> int | tuple[int, ...] | None:
        if isinstance(self.policy.budget, Fixed):
            return None
        return self.budgets if len(set(self.budgets)) > 1 else self.budgets[0]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            n=len(self.budgets),
            temperature=1.0,  # greedy answers of a random model soon go in circles
            seed=len(self.prompt),
            max_tokens=self.answer,
            ignore_eos=True,
            logprobs=3,
            prompt_logprobs=2,
            eviction=self.policy,
            kv_budget=self._kv_budget,
            context_tokens=self.context_len,
            protect=self.spans,
            template_tail=self.template_tail,
        )


def build(path: Path, seed: int, num_layers: int | None = None) -> torch.nn.Module:
    """A tiny model with weights so large that attention is far from flat, and a tokenizer with all kinds of tokens."""
    rng = random.Random(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers or rng.choice([3, 3, 4]),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=rng.choice([8, 16]),
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight.add_(0.3 * torch.randn_like(weight))
                else:
                    weight.normal_(0.0, 1.0 if "embed" in name else 0.2)
    model.save_pretrained(path)
    special = dict(zip(("bos_token", "eos_token", "pad_token"), WORDS, strict=False))
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, WORDS[-1]))
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(path)
    return model.eval()


Model = tuple[Path, torch.nn.Module]


class Models:
    """Models by their seeds, each with an engine that requests of several tests go through."""

    def __init__(self, new_directory: Callable[[str], Path]) -> None:
        self._new_directory = new_directory
        self._built: dict[int, Model] = {}
        self._shared: dict[int, LLM] = {}

    def __call__(self, seed: int) -> Model:
        if seed not in self._built:
            path = self._new_directory("model")
            self._built[seed] = path, build(path, seed)
        return self._built[seed]

    @contextmanager
    def opened(self, seed: int, **options: object) -> Iterator[LLM]:
        """An engine of its own with these options; with none the shared one."""
        llm = None if options else self._shared.pop(seed, None)
        llm = llm or open_llm(self(seed)[0], seed, **options)
        try:
            yield llm
        except BaseException:
            llm.close()
            raise
        if options:
            llm.close()
        else:
            self._shared[seed] = llm

    def close(self) -> None:
        for llm in self._shared.values():
            llm.close()


# -- how it is compared --------------------------------------------------------------------------------------------


class Watched:
    """A sample in the engine, and the oracle at its side."""

    def __init__(self, model: Llama, asked: Asked, sequence: Sequence) -> None:
        self.asked = asked
        self.sequence = sequence
        self.oracle = DenseSequence(
            model,
            asked.policy,
            asked.budgets[sequence.index],
            len(asked.prompt),
            len(asked.prompt) + asked.answer,
            block_size=BLOCK,
            context_len=asked.context_len,
            spans=asked.spans,
            template_tail=asked.template_tail,
            asks=ASKS,
        )

    @property
    def sure(self) -> bool:
        return self.oracle.unsure_from is None

    @property
    def ready(self) -> bool:
        """Whether the next step computes the token sampled last."""
        return self.sequence.kv.num_computed >= len(self.asked.prompt) and not self.sequence.finished

    def follow(self, llm: LLM) -> None:
        """Bring the oracle to where the engine is."""
        oracle, sequence = self.oracle, self.sequence
        if sequence.kv.num_computed > oracle.computed:
            oracle.stored = stored_in(llm, sequence.kv.slot, oracle)
        when = self.asked.policy.when
        pressed = sequence.kv.last_round == oracle.computed > 0 and when != when.alone
        if pressed and oracle.computed >= oracle.prompt_len and oracle.holds_too_much():
            oracle.shrink()
        oracle.advance(sequence.token_ids, sequence.kv.num_computed)

    def compare_rows(self, llm: LLM) -> None:
        oracle, sequence = self.oracle, self.sequence
        if (
            not self.sure
            or sequence.kv.slot is None
            or sequence.kv.replayed
            or sequence.kv.num_computed != oracle.computed
        ):
            return
        if sequence.kv.last_round == oracle.computed and oracle.is_due():
            return  # the round ran and the tokens after it wait for free blocks; the oracle runs it with them
        fresh = oracle.computed == oracle.last_round + 1 and oracle.num_rounds < 4
        everything = fresh or oracle.computed % 16 == 0
        if not fresh and oracle.computed % 4:
            return  # what is gone stays gone
        pool = pool_of(llm)
        position = pool.position.flatten()
        for row, place in rows_of(llm, sequence.kv.slot, oracle):
            where = f"layer {row.layer} head {row.head} with {oracle.computed} tokens computed"
            assert position[place].tolist() == [kv.position for kv in row.held], where
            if everything:
                for name, ours, theirs in (
                    ("keys", pool.of_layer(-1).keys(place), row.rotated),
                    ("values", pool.of_layer(-1).values(place), row.value),
                ):
                    message = f"{name} of {where}"
                    np.testing.assert_allclose(ours, theirs[row.tokens], atol=1e-4, err_msg=message)


def submit(llm: LLM, model: Llama, asked: Asked) -> list[Watched]:
    """Queue a request. Returns its samples."""
    llm.submit(asked.prompt, asked.params)
    request = list(llm._engine.scheduler.waiting)[-1].request
    return [Watched(model, asked, sequence) for sequence in request.sequences]


def pool_of(llm: LLM) -> KVPool:
    executor = llm._engine._executor
    assert isinstance(executor, TorchExecutor)
    return executor.cache.pool


def rows_of(llm: LLM, slot: int, oracle: DenseSequence) -> Iterator[tuple[Row, torch.Tensor]]:
    """The rows of the oracle, and where the engine holds the KVs of each: slots of the pool, by position."""
    tables, position = llm._engine._executor.cache.tables, pool_of(llm).position.flatten()
    for layer, lengths in enumerate(tables.host_lengths[slot].tolist()):
        blocks = tables.lookup(torch.tensor([slot]), layer, -(-max(lengths) // BLOCK))[0].long()
        places = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)
        for head, length in enumerate(lengths):
            place = places[head, :length]
            yield oracle.rows[layer][head], place[position[place].argsort()]


def stored_in(llm: LLM, slot: int | None, oracle: DenseSequence) -> Stored | None:
    """What the pool holds of the KVs of a slot, where its codec rounds coarsely; None: of one that has just ended.

    A number halfway between two codes goes either way, and that changes what follows: so the oracle reads what is
    stored, and looks whether it is as near to what it computed as the codec's own rounding of that.
    """
    pool = pool_of(llm)
    codec = pool.layout.codecs[0]
    if isinstance(codec, PlainCodec):
        return None
    rows: dict[tuple[int, int], dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
    position_of, kvs = pool.position.flatten(), pool.of_layer(-1)
    for row, place in () if slot is None else rows_of(llm, slot, oracle):
        new = place[position_of[place] >= oracle.computed]
        pairs = zip(kvs.keys(new), kvs.values(new), strict=True)
        rows[row.layer, row.head] = dict(zip(position_of[new].tolist(), pairs, strict=True))

    def stored(row: Row, position: int, k: Array, v: Array) -> tuple[Array, Array]:
        pair = rows[row.layer, row.head][position] if rows else None
        if pair and position % 4:  # every fourth KV is looked at
            return pair[0].double().numpy(), pair[1].double().numpy()
        exact = [torch.from_numpy(x).float() for x in (k, v)]
        rounded = codec.keys(codec.encode_keys(exact[0])), codec.values(codec.encode_values(exact[1]))
        pair = pair or rounded
        for name, ours, theirs, near in zip(("key", "value"), pair, exact, rounded, strict=True):
            off, least = float((ours - theirs).norm()), float((near - theirs).norm())
            assert off <= 1.05 * least + 1e-3, f"{name} of layer {row.layer} head {row.head} at {position}"
        return pair[0].double().numpy(), pair[1].double().numpy()

    return stored


def play(llm: LLM, model: Llama, asked: list[Asked]) -> list[Watched]:
    """Run the requests together, the oracle in lockstep. Returns those whose choices were all sure."""
    watched = [sample for each in asked for sample in submit(llm, model, each)]
    outputs: dict[str, RequestOutput] = {}
    while llm.has_unfinished:
        round_at_intervals([w for w in watched if w.ready], llm.stats().num_steps + 1)
        outputs |= {output.request_id: output for output in llm.step()}
        for each in watched:
            each.follow(llm)
            each.compare_rows(llm)
    llm.check_integrity()
    for each in watched:
        output = outputs[each.sequence.request.request_id]
        found = (output.prompt_logprobs or [])[1:] + (output.outputs[each.sequence.index].logprobs or [])
        assert len(found) == len(each.oracle.logprobs) == len(each.asked.prompt) + each.asked.answer - 1
        # What samples of one prompt compute apart of it is reported with the first.
        first = len(each.asked.prompt) - 1 if each.sequence.index else 0
        # What was stored of the last token is not known any more: `stored_in` rounds it anew.
        known = len(found) - (not isinstance(pool_of(llm).layout.codecs[0], PlainCodec))
        end = known if each.oracle.unsure_from is None else min(known, each.oracle.unsure_from)
        for n, (entry, expected) in enumerate(zip(found, each.oracle.logprobs, strict=True)):
            if first <= n < end:
                for token, logprob in (entry or {}).items():
                    assert logprob.logprob == pytest.approx(expected[token], abs=1e-4), f"after token {n}"
    return [each for each in watched if each.sure]


def round_at_intervals(ready: list[Watched], step: int) -> None:
    """The rounds that fall before a step of the engine for the sake of all sequences."""
    able = [w for w in ready if w.oracle.holds_too_much()]
    waiting = [w for w in able if w.asked.policy.when.uncompressed_tokens is not None]
    gathered = sum(w.oracle.computed - w.oracle.last_round for w in waiting)
    for each in able:
        when = each.asked.policy.when
        every, most = when.every_steps, when.uncompressed_tokens
        if (every is not None and step % every == 0) or (most is not None and gathered >= most):
            each.oracle.shrink()


# -- cases ---------------------------------------------------------------------------------------------------------


def small(policy: EvictionPolicy, rng: random.Random) -> EvictionPolicy:
    """The policy with numbers so small that all of it matters to short prompts."""
    score, budget, keep, when = policy.score, policy.budget, policy.keep, policy.when
    window = rng.choice([4, 8])
    if score.window and isinstance(score, Window | Derived):
        score = _narrow(score, window)
    elif isinstance(score, BelowAverage):
        score = replace(score, history=rng.choice([5, 12]))
    elif isinstance(score, Cumulative) and score.exclude_first:
        score = replace(score, exclude_first=rng.choice([2, 3]))
    elif isinstance(score, Reconstruction):
        score = replace(score, asked=replace(score.asked, chunk=rng.choice([64, 17]), starting=3))
    if isinstance(budget, EqualHeads | AdaptiveHeads) and isinstance(budget.layers, Pyramid):
        budget = replace(budget, layers=Pyramid(beta=rng.choice([2, 5, 20])))
    if isinstance(keep.recent, int) and keep.recent:
        keep = replace(keep, recent=window if score.window else rng.choice([3, 8]))
    if keep.sinks > 1:
        keep = replace(keep, sinks=rng.choice([1, 2]))
    if when.prefill_every:
        when = replace(when, prefill_every=rng.choice([8, 16]))
    if when.prefill_compression:
        when = replace(when, prefill_compression=rng.choice([1.5, 2.5]))
    if when.decode_every and when.decode_every > 1:
        when = replace(when, decode_every=rng.choice([3, 8]))
    return replace(policy, score=score, budget=budget, keep=keep, when=when)


def _narrow(score: Scorer, window: int) -> Scorer:
    """The score with a window of `window` queries, and pooling over three KVs where it pools sentences."""
    if isinstance(score, BySentence):
        return replace(score, inner=_narrow(score.inner, window), pool=Smoothing(3))
    if isinstance(score, Derived):
        return replace(score, inner=_narrow(score.inner, window))
    return replace(score, size=window) if isinstance(score, Window) else score


def ask(policy: EvictionPolicy, rng: random.Random, answer: int) -> Asked:
    """A random prompt and budget for a policy."""
    # Equal tokens have equal keys and values in the first layer: scores that differ by rounding only.
    prompt = rng.sample(range(len(WORDS)), rng.randint(30, 90))
    room = policy.when.prefill_every or 0 if policy.when.within else 0
    return Asked(prompt, policy, rng.randint(12, 32) + room, answer)


def open_llm(path: Path, seed: int, **options: object) -> LLM:
    settings: dict[str, object] = {
        "kv_memory": "4MiB",
        "block_size": BLOCK,
        "num_accumulators": 2,
        "max_num_seqs": [2, 3][seed % 2],
        "prefill_chunk": [16, 64, None][seed % 3],
        "verify_model": False,  # what it computes is compared anyway
    }
    return LLM(path, **(settings | options))


def compare(models: Models, seed: int, asked: list[Asked], **options: object) -> EngineStats:
    with models.opened(seed, **options) as llm:
        sure = play(llm, Llama(models(seed)[1]), asked)
        stats = llm.stats()
    if not sure:
        pytest.skip("every request met a choice too close for float32")
    return stats


def tight(models: Models, seed: int, kvs: int) -> int:
    """Memory for about that many KVs a row, of all sequences together."""
    with models.opened(seed) as llm:
        layout = llm._engine.scheduler.ledger.layout
    return layout.blocks_for(kvs) * layout.block_bytes + 10_000
