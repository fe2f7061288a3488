"""Every policy, run by the engine, keeps what the dense oracle keeps, token for token, and says what it says.

WINNOW_SEEDS: how many models, prompts and budgets each case is tried with.
"""

import copy
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_oracle import DenseSequence, Llama, Row
from random_predictor import save_random_predictor
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from winnow import LLM, SamplingParams
from winnow.attention import Group, Smoothing
from winnow.cache import KVPool
from winnow.engine.request import Sequence
from winnow.eviction import (
    PRESETS,
    PUNCTUATION,
    SPECIAL,
    AdaptiveHeads,
    AdaptiveRows,
    Average,
    BelowAverage,
    ByOutputNorm,
    ByValueNorm,
    ChunkAttention,
    Compactor,
    Cumulative,
    EqualHeads,
    EvictionPolicy,
    EvictionTarget,
    ExpectedAttention,
    Fixed,
    Keep,
    KeyDifference,
    LastQuery,
    LayerGroups,
    LazyLayers,
    Leverage,
    MeanDeviation,
    Pyramid,
    Recency,
    Recipes,
    Reconstruction,
    ValueAware,
    When,
    Window,
)
from winnow.executor.torch_executor import TorchExecutor
from winnow.outputs import EngineStats, RequestOutput

SEEDS = range(int(os.environ.get("WINNOW_SEEDS", "1")))
BLOCK = 4
WORDS = ["<s>", "</s>", "<pad>", ".", ",", "?!"] + [f"w{n}" for n in range(91)]
ANSWERS, SHORT_ANSWERS = [101, 49, 25], [61, 33, 25]
# The tokenizer below knows no words of a replay: each is one unknown word.
ASKS = [WORDS.index(WORDS[-1])], [WORDS.index(WORDS[-1])]
KINDS = [SPECIAL] * 3 + [PUNCTUATION] * 3 + [0] * 91


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
        if isinstance(self.policy.budget, Fixed | Recipes):
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
    save_random_predictor(path)
    return model.eval()


Model = tuple[Path, torch.nn.Module]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Model]:
    built: dict[int, Model] = {}

    def model(seed: int) -> Model:
        if seed not in built:
            path = tmp_path_factory.mktemp("model")
            built[seed] = path, build(path, seed)
        return built[seed]

    return model


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
            kinds=KINDS,
            asks=ASKS,
        )

    @property
    def sure(self) -> bool:
        return self.oracle.unsure_from is None

    @property
    def ready(self) -> bool:
        """Whether the next step computes the token sampled last."""
        return self.sequence.kv.num_computed >= len(self.asked.prompt) and not self.sequence.finished

    def follow(self) -> None:
        """Bring the oracle to where the engine is."""
        oracle, sequence = self.oracle, self.sequence
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
        fresh = oracle.computed == oracle.last_round + 1 and oracle.num_rounds < 4
        everything = fresh or oracle.computed % 16 == 0
        pool = pool_of(llm)
        position, k, v = pool.position.flatten(), pool.k.flatten(0, 1), pool.v.flatten(0, 1)
        for row, place in rows_of(llm, sequence.kv.slot, oracle):
            where = f"layer {row.layer} head {row.head} with {oracle.computed} tokens computed"
            assert position[place].tolist() == [kv.position for kv in row.held], where
            if everything:
                for name, ours, theirs in (("keys", k, row.rotated), ("values", v, row.value)):
                    message = f"{name} of {where}"
                    np.testing.assert_allclose(ours[place], theirs[row.tokens], atol=1e-4, err_msg=message)


def submit(llm: LLM, model: Llama, asked: Asked) -> list[Watched]:
    """Queue a request. Returns its samples."""
    llm.submit(asked.prompt, asked.params)
    request = list(llm._engine._scheduler.waiting)[-1].request
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


def play(llm: LLM, model: Llama, asked: list[Asked]) -> list[Watched]:
    """Run the requests together, the oracle in lockstep. Returns those whose choices were all sure."""
    watched = [sample for each in asked for sample in submit(llm, model, each)]
    outputs: dict[str, RequestOutput] = {}
    while llm.has_unfinished:
        round_at_intervals([w for w in watched if w.ready], llm.stats().num_steps + 1)
        outputs |= {output.request_id: output for output in llm.step()}
        for each in watched:
            each.follow()
            each.compare_rows(llm)
    llm.check_integrity()
    for each in watched:
        output = outputs[each.sequence.request.request_id]
        told = (output.prompt_logprobs or [])[1:] + (output.outputs[each.sequence.index].logprobs or [])
        assert len(told) == len(each.oracle.logprobs) == len(each.asked.prompt) + each.asked.answer - 1
        # What samples of one prompt compute apart of it is told of the first.
        first = len(each.asked.prompt) - 1 if each.sequence.index else 0
        end = len(told) if each.oracle.unsure_from is None else each.oracle.unsure_from
        for n, (entry, expected) in enumerate(zip(told, each.oracle.logprobs, strict=True)):
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
    if isinstance(score, Window | ValueAware):
        score = replace(score, size=window)
    elif isinstance(score, BelowAverage):
        score = replace(score, history=rng.choice([5, 12]))
    elif isinstance(score, Compactor):
        score = replace(score, chunk=rng.choice([8, 24]), sinks=rng.choice([1, 3]))
    elif isinstance(score, Cumulative) and score.exclude_first:
        score = replace(score, exclude_first=rng.choice([2, 3]))
    elif isinstance(score, Reconstruction):
        score = replace(score, asked=replace(score.asked, chunk=rng.choice([64, 17]), starting=3))
    if isinstance(budget, LazyLayers):
        budget = replace(budget, threshold=rng.choice([0.4, 0.5]))
    elif isinstance(budget, Recipes):
        budget = replace(budget, recovery=rng.choice([0.5, 0.7, 0.9]))
    elif isinstance(budget, EqualHeads | AdaptiveHeads) and isinstance(budget.layers, Pyramid):
        budget = replace(budget, layers=Pyramid(beta=rng.choice([2, 5, 20])))
    if isinstance(keep.recent, int) and keep.recent:
        keep = replace(keep, recent=window if score.window else rng.choice([3, 8]))
    if keep.sinks > 1:
        keep = replace(keep, sinks=rng.choice([1, 2]))
    if when.prefill_every:
        when = replace(when, prefill_every=rng.choice([8, 16]))
    if when.decode_every and when.decode_every > 1:
        when = replace(when, decode_every=rng.choice([3, 8]))
    return replace(policy, score=score, budget=budget, keep=keep, when=when)


def ask(policy: EvictionPolicy, rng: random.Random, answer: int) -> Asked:
    """A random prompt and budget for a policy."""
    # Equal tokens have equal keys and values in the first layer: worth that differs by rounding only.
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
    }
    return LLM(path, **(settings | options))


def compare(models: Callable[[int], Model], seed: int, asked: list[Asked], **options: object) -> EngineStats:
    path, model = models(seed)
    with open_llm(path, seed, **options) as llm:
        sure = play(llm, Llama(model), asked)
        if not sure:
            pytest.skip("every request met a choice too close for float32")
        return llm.stats()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PRESETS)
def test_preset(name: str, seed: int, models: Callable[[int], Model]) -> None:
    rng = random.Random(f"{name} {seed}")
    policy = small(PRESETS[name].policy, rng)
    asked = [ask(policy, rng, answer) for answer in ANSWERS]
    asked[2] = replace(asked[2], context_len=len(asked[2].prompt) - rng.randint(1, 12))
    compare(models, seed, asked)


def before_template(policy: EvictionPolicy) -> EvictionPolicy:
    """The same with windows that end with the question."""
    score = policy.score
    if isinstance(score, Window | ValueAware):
        score = replace(score, skip_template=True)
    return replace(policy, score=score)


TEMPLATED = [
    name
    for name, preset in PRESETS.items()
    if before_template(preset.policy).score.before_template
    and not (preset.policy.reassign_positions or preset.policy.when.never)
    and not isinstance(preset.policy.budget, Fixed)
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TEMPLATED)
def test_a_template_follows_the_question(name: str, seed: int, models: Callable[[int], Model]) -> None:
    """Windows and recent KVs end with the question, and what follows it stays."""
    rng = random.Random(f"template {name} {seed}")
    policy = before_template(small(PRESETS[name].policy, rng))
    asked = []
    for answer, tail in zip(SHORT_ANSWERS, (rng.randint(1, 7), rng.randint(9, 12), 3), strict=True):
        each = ask(policy, rng, answer)
        room = tail if isinstance(policy.budget, Recipes) else each.budgets[0] + tail
        asked.append(replace(each, budget=room, template_tail=tail))
    compare(models, seed, asked)


@pytest.mark.parametrize("seed", SEEDS)
def test_preempted_behind_a_template(seed: int, models: Callable[[int], Model]) -> None:
    rng = random.Random(f"preempted template {seed}")
    names = ["snapkv", "ada-pyramidkv", "scissorhands", "kv-compress-full", "kv-compress-pd", "dropkv", "h2o"]
    policies = [before_template(small(PRESETS[name].policy, rng)) for name in names]
    asked = [
        replace(ask(replace(p, when=p.when.alone), rng, 61), budget=30, template_tail=5) for p in policies
    ]
    stats = compare(models, seed, asked, max_num_seqs=7, kv_memory=tight(models, seed, 180))
    assert stats.num_preemptions > 0


ONCE = When(after_prefill=True)
ALWAYS = When(after_prefill=True, prefill_every=8, decode_every=6)
WITHIN = When(prefill_every=8, decode_every=8, within=True)
COMPOSED = {
    "window, group max, pooled per query head": EvictionPolicy(
        Window(8, 1, Smoothing(7, per_query_head=True), Group.MAX, continual=True),
        EqualHeads(),
        Keep(recent=8),
        ALWAYS,
    ),
    "window, mean pooled, pyramid": EvictionPolicy(
        Window(4, 1, Smoothing(5, "average", skip_window=True), Group.MEAN),
        EqualHeads(Pyramid(3)),
        Keep(sinks=1, recent=4),
        When(after_prefill=True, prefill_every=16),
    ),
    "window without a round after the prompt": EvictionPolicy(
        Window(4, 2, Smoothing(3), continual=True),
        AdaptiveRows(),
        Keep(recent=4),
        When(prefill_every=8, decode_every=8),
    ),
    "cumulative, group max, heads compete": EvictionPolicy(
        Cumulative(2, group=Group.MAX), AdaptiveHeads(floor=0.5), Keep(sinks=1, recent=3), ALWAYS
    ),
    "average without first queries": EvictionPolicy(
        Average(exclude_first=3), EqualHeads(), Keep(recent=4), WITHIN
    ),
    "average, rows compete within": EvictionPolicy(
        Average(group=Group.MAX), AdaptiveRows(), Keep(sinks=2), WITHIN
    ),
    "heads compete over layer groups": EvictionPolicy(
        Cumulative(), AdaptiveHeads(layers=LayerGroups()), Keep(recent=3), ALWAYS
    ),
    "rows compete by key difference, nothing kept": EvictionPolicy(
        KeyDifference(), AdaptiveRows(), Keep(), ALWAYS
    ),
    "rows compete by leverage, nothing kept": EvictionPolicy(Leverage(0.3), AdaptiveRows(), Keep(), ALWAYS),
    "leverage of neighbours, heads compete": EvictionPolicy(
        Leverage(1.0, Smoothing(3)), AdaptiveHeads(), Keep(sinks=1), ALWAYS
    ),
    "below average, forgotten in the prompt": EvictionPolicy(
        BelowAverage(6), EqualHeads(Pyramid(2)), Keep(recent=2), ALWAYS
    ),
    "value aware, heads compete over a pyramid": EvictionPolicy(
        ValueAware(4, Smoothing(3, "average"), continual=True),
        AdaptiveHeads(floor=0.3, layers=Pyramid(4)),
        Keep(recent=4),
        ALWAYS,
    ),
    "last query over layer groups": EvictionPolicy(
        LastQuery(), EqualHeads(LayerGroups(share=0.5)), Keep(sinks=1), ALWAYS
    ),
    "lazy layers go on": EvictionPolicy(
        LastQuery(), LazyLayers(0.4), Keep(sinks=1, recent=0.75), When(after_prefill=True, decode_every=8)
    ),
    "deviation, group max": EvictionPolicy(
        MeanDeviation(Group.MAX), EqualHeads(), Keep(sinks=1, recent=0.1), WITHIN
    ),
    "rows compete by age: equals everywhere": EvictionPolicy(
        Recency(), AdaptiveRows(), Keep(sinks=1), ALWAYS
    ),
    "heads compete by counts: many equals": EvictionPolicy(
        BelowAverage(5), AdaptiveHeads(), Keep(sinks=1), ALWAYS
    ),
    "rows compete by counts: many equals": EvictionPolicy(
        BelowAverage(5), AdaptiveRows(), Keep(sinks=1), ALWAYS
    ),
    "rows compete, the newest are worth nothing": EvictionPolicy(
        Cumulative(exclude_first=9), AdaptiveRows(), Keep(sinks=1), ALWAYS
    ),
    "recipes go on": EvictionPolicy(
        Cumulative(2),
        Recipes(recovery=0.8, heavy=0.2, local=0.15),
        Keep(sinks=1),
        When(after_prefill=True, decode_every=16),
    ),
    "fixed": EvictionPolicy(Cumulative(), Fixed(kvs=7), Keep(recent=0.3), ALWAYS),
    "expected attention, rows compete": EvictionPolicy(
        ExpectedAttention(horizon=20, skip=2), AdaptiveRows(row_floor=0.5), Keep(sinks=2), ALWAYS
    ),
    "expected attention by value norm, sinks unprotected": EvictionPolicy(
        ByValueNorm(ExpectedAttention(skip=1), 0.02), AdaptiveHeads(), Keep(recent=2), ALWAYS
    ),
    "attention within chunks": EvictionPolicy(ChunkAttention(12, 3), EqualHeads(), Keep(sinks=3), ALWAYS),
    "compactor within, rows compete": EvictionPolicy(
        Compactor(16, sinks=2, blending=0.5), AdaptiveRows(), Keep(sinks=2, recent=2), WITHIN
    ),
    "leverage of unrotated keys": EvictionPolicy(
        Leverage(0.3, Smoothing(3, "average"), unrotated=True), AdaptiveHeads(), Keep(), ALWAYS
    ),
    "window by output norm": EvictionPolicy(
        ByOutputNorm(Window(4, 2, Smoothing(3), continual=True)), AdaptiveRows(), Keep(recent=4), ALWAYS
    ),
    "average by value norm": EvictionPolicy(
        ByValueNorm(Average(exclude_first=2)), EqualHeads(), Keep(recent=3), WITHIN
    ),
    "last query by value norm over all heads": EvictionPolicy(
        ByValueNorm(LastQuery()), EqualHeads(), Keep(sinks=1), ALWAYS
    ),
    "rows compete above floors": EvictionPolicy(
        KeyDifference(), AdaptiveRows(row_floor=0.5, layer_floor=0.75), Keep(sinks=1), ALWAYS
    ),
    "rows compete above a count, the first layer wide": EvictionPolicy(
        Cumulative(2), AdaptiveRows(row_floor=6, wide_layers=1), Keep(sinks=1, recent=3), ALWAYS
    ),
    "rows compete, two layers of twice the width, within": EvictionPolicy(
        Average(), AdaptiveRows(wide_layers=2, wide_factor=1.25, layer_floor=0.5), Keep(sinks=2), WITHIN
    ),
    "heads compete above floors over a pyramid": EvictionPolicy(
        Cumulative(), AdaptiveHeads(0.0, Pyramid(20), row_floor=0.4), Keep(recent=3), ALWAYS
    ),
    "heads compete, the first layer wide": EvictionPolicy(
        Leverage(0.3), AdaptiveHeads(0.2, wide_layers=1, layer_floor=0.3), Keep(sinks=1), ALWAYS
    ),
    "a pyramid with a floor and a wide base": EvictionPolicy(
        Cumulative(), EqualHeads(Pyramid(20), layer_floor=0.5, wide_layers=1), Keep(recent=3), ALWAYS
    ),
    "lazy layers, the first wide": EvictionPolicy(
        LastQuery(), LazyLayers(0.4, wide_layers=1), Keep(sinks=1, recent=0.75), When(after_prefill=True)
    ),
    "positions re-assigned within": EvictionPolicy(
        Recency(), EqualHeads(), Keep(sinks=2), WITHIN, reassign_positions=True
    ),
    "every few steps": EvictionPolicy(
        Cumulative(), EqualHeads(), Keep(recent=4), When(after_prefill=True, every_steps=7)
    ),
    "when all have gathered": EvictionPolicy(
        Window(4, 2, continual=True),
        AdaptiveRows(),
        Keep(recent=4),
        When(after_prefill=True, uncompressed_tokens=25),
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COMPOSED)
def test_composition(name: str, seed: int, models: Callable[[int], Model]) -> None:
    """The third request has a question after its context, and two spans to protect."""
    rng = random.Random(f"{name} {seed}")
    asked = [ask(COMPOSED[name], rng, answer) for answer in SHORT_ANSWERS]
    prompt = asked[2].prompt
    context, budget = len(prompt) - rng.randint(1, 12), asked[2].budgets[0] + 8
    asked[2] = replace(asked[2], context_len=context, budget=budget)
    # Not where positions change, or where the protected set is the budget.
    if not (
        COMPOSED[name].reassign_positions or isinstance(COMPOSED[name].budget, Fixed | Recipes | LazyLayers)
    ):
        asked[2] = replace(asked[2], spans=((3, 5), (rng.randint(6, 10), 12)))
    compare(models, seed, asked)


@pytest.mark.parametrize("seed", SEEDS)
def test_policies_share_a_batch_and_rounds_rank_few_at_a_time(
    seed: int, models: Callable[[int], Model]
) -> None:
    rng = random.Random(f"few {seed}")
    names = ["h2o", "kv-compress-pd", "roco", "fastgen", "streaming-shift", "squeeze", "full"]
    asked = [ask(small(PRESETS[name].policy, rng), rng, 33) for name in names]
    compare(models, seed, asked, max_num_seqs=6, max_round_kvs=300)


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_under_pressure(seed: int, models: Callable[[int], Model]) -> None:
    rng = random.Random(f"pressure {seed}")
    names = ["kv-compress", "h2o-once", "kv-compress-full", "dropkv"]
    asked = [ask(small(PRESETS[name].policy, rng), rng, 61) for name in names]
    stats = compare(models, seed, asked, max_num_seqs=4, kv_memory=tight(models, seed, 220))
    assert stats.num_preemptions == 0, "their rounds are not repeated"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["kv-compress", "kv-compress-full"])
def test_the_round_after_a_prompt_takes_in_all(
    name: str, seed: int, models: Callable[[int], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    members: list[int] = []
    evict = TorchExecutor.evict

    def counted(executor: TorchExecutor, taking_part: list[EvictionTarget]) -> list[int]:
        members.append(len(taking_part))
        return evict(executor, taking_part)

    monkeypatch.setattr(TorchExecutor, "evict", counted)
    rng = random.Random(f"join {seed}")
    policy = small(PRESETS[name].policy, rng)
    asked = [ask(policy, rng, 61) for _ in range(3)]
    compare(models, seed, asked, max_num_seqs=2)  # the third begins when one of the others has ended
    assert max(members) > 1


@pytest.mark.parametrize("seed", SEEDS)
def test_preempted(seed: int, models: Callable[[int], Model]) -> None:
    """What is computed again after a preemption is shrunk at the same places."""
    rng = random.Random(f"preempted {seed}")
    names = [
        "snapkv",
        "ada-pyramidkv",
        "scissorhands",
        "kv-compress-full",
        "streaming-shift",
        "squeeze",
        "full",
    ]
    policies = [small(PRESETS[name].policy, rng) for name in names]
    asked = [ask(replace(p, when=p.when.alone), rng, 61) for p in policies]
    stats = compare(models, seed, asked, max_num_seqs=7, kv_memory=tight(models, seed, 180))
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budgets", [(14, 24, 19), (17, 17)], ids=["budgets apart", "budgets alike"])
def test_samples_of_one_prompt(budgets: tuple[int, ...], seed: int, models: Callable[[int], Model]) -> None:
    rng = random.Random(f"samples {seed}")
    policies = [small(PRESETS[name].policy, rng) for name in ("kv-compress-full", "scissorhands", "snapkv")]
    asked = [replace(ask(policy, rng, 33), budget=budgets) for policy in policies]
    asked[0] = replace(asked[0], context_len=len(asked[0].prompt) - rng.randint(1, 12))
    compare(models, seed, asked, max_num_seqs=9)


@pytest.mark.parametrize("seed", SEEDS)
def test_layer_groups_of_several_layers(seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"groups {seed}")
    deep = tmp_path, build(tmp_path, seed, num_layers=8)
    policies = [PRESETS["squeeze"].policy, COMPOSED["heads compete over layer groups"]]
    compare(lambda _: deep, seed, [ask(policy, rng, 17) for policy in policies])


def tight(models: Callable[[int], Model], seed: int, kvs: int) -> int:
    """Memory for about so many KVs a row, of all sequences together."""
    path, _ = models(seed)
    with open_llm(path, seed) as llm:
        layout = llm._engine._scheduler.ledger.layout
    return layout.blocks_for(kvs) * layout.block_bytes + 10_000


def test_value_aware_worth_of_a_kv_that_takes_nearly_everything(
    models: Callable[[int], Model], tmp_path: Path
) -> None:
    """Sinks do; what the output would lose with them must not drown in rounding."""
    _, model = models(0)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name:
                weight.mul_(4.0)
    model.save_pretrained(tmp_path)
    policy = EvictionPolicy(ValueAware(8), EqualHeads(), Keep(recent=8), ONCE)
    prompt = random.Random(2).sample(range(len(WORDS)), 60)
    with open_llm(tmp_path, 0, prefill_chunk=None) as llm:
        [watched] = submit(llm, Llama(model), Asked(prompt, policy, 20, 10))
        llm.step()
        watched.follow()
        assert watched.sequence.kv.slot is not None
        score = pool_of(llm).accumulators[0].flatten()
        for row, place in rows_of(llm, watched.sequence.kv.slot, watched.oracle):
            worths = watched.oracle.worths(row)
            expected = [worths[j].value for j in row.tokens]
            np.testing.assert_allclose(score[place], expected, rtol=0.1, atol=1e-6)


def test_recipes_keep_what_is_protected(models: Callable[[int], Model]) -> None:
    policy = EvictionPolicy(Cumulative(), Recipes(), Keep(sinks=1, recent=4), ONCE)
    asked = ask(policy, random.Random(0), 21)
    compare(models, 0, [replace(asked, spans=((3, 6),))])


def test_recipes_leave_the_older_of_two_equals(models: Callable[[int], Model]) -> None:
    policy = EvictionPolicy(
        Cumulative(exclude_first=20), Recipes(recovery=0.99, heavy=0.9, local=0.1), Keep(), ONCE
    )
    compare(models, 0, [ask(policy, random.Random(0), 21)])


def test_the_oracle_computes_what_transformers_computes(models: Callable[[int], Model]) -> None:
    _, model = models(0)
    prompt = random.Random(0).choices(range(len(WORDS)), k=40)
    oracle = DenseSequence(Llama(model), EvictionPolicy(), 1, len(prompt), len(prompt), block_size=BLOCK)
    oracle.advance(prompt, len(prompt))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    told = torch.tensor([x.tolist() for x in oracle.logprobs], dtype=torch.float32)
    torch.testing.assert_close(told, expected, atol=2e-5, rtol=0)
