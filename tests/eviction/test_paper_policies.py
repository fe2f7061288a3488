"""The policies of examples/policies keep what their papers' equations say, from all attention of a dense Llama."""

import importlib.util
import random
import string
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense_model import Array, Llama, cosine, softmax
from dense_oracle import DenseSequence
from dense_state import Row, Score
from lockstep import ASKS, BLOCK, ONCE, WORDS, build, open_llm, pool_of, rows_of

from winnow import LLM, SamplingParams
from winnow.errors import InvalidRequestError
from winnow.eviction import EvictionPolicy, Replay, When

FOLDER = Path(__file__).parents[2] / "examples/policies"
LENGTH, BUDGET = 90, 24
Kept = list[int]


def plugin(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("model")
    return path, build(path, 0, num_layers=4)


@pytest.fixture(scope="module")
def llm(model: tuple[Path, Any]) -> Iterator[LLM]:
    with open_llm(model[0], 0, prefill_chunk=32) as llm:
        yield llm


class Oracle(DenseSequence, ABC):
    """One prompt, computed whole, and one round by a paper's rule."""

    @abstractmethod
    def score(self, row: Row) -> Mapping[int, Any]:
        """The score of each KV of the row, by token."""

    def keeps(self) -> list[int] | None:
        return None

    def scores(self, row: Row) -> dict[int, Score]:
        return {j: Score(value) for j, value in self.score(row).items()}

    def _keeps(self, scores: dict[tuple[int, int], dict[int, Score]]) -> list[int]:
        keeps = self.keeps()
        return super()._keeps(scores) if keeps is None else keeps

    def free(self, row: Row) -> list[int]:
        return [kv.token for kv in row.held if not self._protected(kv)]


def check(
    llm: LLM, model: Any, policy: EvictionPolicy, oracle: type[Oracle], budget: int | None = BUDGET
) -> Oracle:
    """Run a prompt through the engine and the oracle; both must hold the same after the round behind it."""
    # No token twice: equal ones have equal keys in the first layer, which differ by rounding alone.
    prompt = random.Random(5).sample(range(len(WORDS)), LENGTH)
    policy = replace(policy, when=ONCE)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, eviction=policy, kv_budget=budget)
    name = llm.submit(prompt, params)
    dense = oracle(Llama(model), policy, budget or 1, LENGTH, LENGTH, block_size=BLOCK, asks=ASKS)
    dense.advance(prompt, LENGTH)
    dense.shrink()
    sequence = llm._engine.requests[name].sequences[0]
    while not sequence.kv.last_round:
        llm.step()
    pool, slot = pool_of(llm), sequence.kv.running_slot
    for row, place in rows_of(llm, slot, dense):
        held = pool.position.flatten()[place].tolist()
        assert [at for at in held if at < LENGTH] == row.tokens, (row.layer, row.head)
    assert sum(len(row.held) for row in dense.all_rows) < LENGTH * len(dense.all_rows)
    llm.abort(name)
    return dense


def test_roco(llm: LLM, model: tuple[Path, Any]) -> None:
    class RoCo(Oracle):
        def score(self, row: Row) -> Mapping[int, Any]:
            seen = LENGTH - np.arange(LENGTH)
            mean = row.paid[:, :LENGTH, :LENGTH].mean(axis=0).sum(axis=0) / seen
            square = (row.paid[:, :LENGTH, :LENGTH] ** 2).mean(axis=0).sum(axis=0) / seen
            deviation, free = np.sqrt(square - mean**2), self.free(row)
            count = max(self.target - (LENGTH - len(free)), LENGTH - self.target)
            steady = sorted(free, key=lambda j: deviation[j])[:count]
            return {j: mean[j] if j in steady else np.inf for j in range(LENGTH)}

    dense = check(llm, model[1], plugin("roco").ROCO, RoCo)
    assert {len(row.held) for row in dense.all_rows} == {BUDGET}


def test_simlayerkv(llm: LLM, model: tuple[Path, Any]) -> None:
    module, lazy = plugin("simlayerkv"), dict[int, bool]()

    class Lazy(Oracle):
        def score(self, row: Row) -> Mapping[int, Any]:
            return dict.fromkeys(range(LENGTH), 0.0)

        def keeps(self) -> list[int]:
            for layer, rows in enumerate(self.rows):
                paid = [row.paid[head, LENGTH - 1, protected].sum() for row in rows for head in range(2)]
                lazy[layer] = float(np.mean(paid)) > threshold
            return [BUDGET if lazy[row.layer] else LENGTH for row in self.all_rows]

    protected = [*range(4), *range(LENGTH - BUDGET + 4, LENGTH)]
    threshold = 0.27
    budget = replace(module.SIMLAYERKV.budget, threshold=threshold)
    check(llm, model[1], replace(module.SIMLAYERKV, budget=budget), Lazy)
    assert set(lazy.values()) == {True, False}  # both kinds of layers are there


def test_fastgen(llm: LLM, model: tuple[Path, Any]) -> None:
    module, taken = plugin("fastgen"), set[int]()
    special, marks = (
        set(range(3)),
        {n for n, word in enumerate(WORDS) if set(word) <= set(string.punctuation) and n > 2},
    )

    class FastGen(Oracle):
        def recipe(self, row: Row) -> set[int]:
            mass = row.paid[:, :LENGTH, :LENGTH].sum(axis=(0, 1))
            order = sorted(range(LENGTH), key=lambda j: -mass[j])
            kept = {0} | {j for j in range(LENGTH) if self.token_ids[j] in special}
            more = [
                {j for j in range(LENGTH) if self.token_ids[j] in marks},
                set(order[: int(0.2 * LENGTH)]),
                set(range(LENGTH - int(0.3 * LENGTH), LENGTH)),
                set(range(LENGTH)),
            ]
            while mass[list(kept)].sum() < 0.62 * mass.sum():
                kept |= more.pop(0)
            taken.add(len(more))
            return kept

        def score(self, row: Row) -> Mapping[int, Any]:
            return {j: float(j in self.recipe(row)) for j in range(LENGTH)}

        def keeps(self) -> list[int]:
            return [len(self.recipe(row)) for row in self.all_rows]

    policy = replace(module.FASTGEN, score=replace(module.FASTGEN.score, recovery=0.62, heavy=0.2))
    check(llm, model[1], policy, FastGen, None)
    assert len(taken) > 1, taken  # heads differ


def test_squeezeattention(model: tuple[Path, Any]) -> None:
    class Squeeze(Oracle):
        def score(self, row: Row) -> Mapping[int, Any]:
            return dict(enumerate(row.paid[:, :LENGTH, :LENGTH].sum(axis=(0, 1))))

        def keeps(self) -> list[int]:
            cosines: list[list[float]] = [[] for _ in self.rows]
            for token, token_id in enumerate(self.token_ids):
                hidden = self._model.embed(token_id)
                for layer, rows in enumerate(self.rows):
                    after = hidden + self._model.join(layer, np.stack([row.out[:, token] for row in rows]))
                    cosines[layer].append(cosine(hidden, after))
                    hidden = after + self._model.feed(layer, after)
            means = np.mean(cosines, axis=1)
            groups = [
                [[i for i in range(4) if of[i] == g] for g in range(3)]
                for of in np.ndindex(3, 3, 3, 3)
                if set(of) == {0, 1, 2}
            ]
            best = min(groups, key=lambda gs: sum(((means[g] - means[g].mean()) ** 2).sum() for g in gs))
            alike = max(best, key=lambda g: means[g].mean())
            poor = int(0.38 * BUDGET)
            rich = (BUDGET * 4 - len(alike) * poor) // (4 - len(alike))
            return [poor if row.layer in alike else rich for row in self.all_rows]

    with open_llm(model[0], 0, optimize=False) as plain:
        # Less than the small share is protected, so that all of it shows.
        policy = plugin("squeezeattention").SQUEEZE
        dense = check(plain, model[1], replace(policy, keep=replace(policy.keep, recent=4)), Squeeze)
    assert len({len(row.held) for row in dense.all_rows}) == 2


def test_scissorhands(llm: LLM, model: tuple[Path, Any]) -> None:
    module = plugin("scissorhands")
    module.EVERY = 1

    class Scissorhands(Oracle):
        def score(self, row: Row) -> Mapping[int, Any]:
            seen = np.tril(np.ones((LENGTH, LENGTH), dtype=bool))
            low = (row.paid[:, :LENGTH, :LENGTH] < 1 / np.arange(1, LENGTH + 1)[:, None]) & seen
            return dict(enumerate(-low[:, -30:].sum(axis=(0, 1)).astype(float)))

        def keeps(self) -> list[int]:
            half, ratios = LENGTH // 2, []
            for rows in self.rows:
                of = []
                for pivotal in (
                    p
                    for row in rows
                    for p in row.paid[:, :LENGTH, :half] > 1 / np.arange(1, LENGTH + 1)[:, None]
                ):
                    early, late = (
                        set(np.flatnonzero(part.any(axis=0))) for part in (pivotal[:half], pivotal[half:])
                    )
                    of.append(len(early & late) / len(late))
                ratios.append(np.mean(of))
            fading = 1 - np.array(ratios)
            return [int(BUDGET * (0.5 + 0.5 * fading[row.layer] / fading.mean())) for row in self.all_rows]

    policy = replace(module.SCISSORHANDS, score=module.Counted(30))
    dense = check(llm, model[1], policy, Scissorhands)
    assert len({len(row.held) for row in dense.all_rows}) > 1


def test_hidden_states_need_transformers_layers(llm: LLM) -> None:
    params = SamplingParams(eviction=plugin("squeezeattention").SQUEEZE, kv_budget=8, max_tokens=1)
    with pytest.raises(InvalidRequestError, match="optimize"):
        llm.generate([[*range(3, 40)]], params)


def test_dropkv(llm: LLM, model: tuple[Path, Any]) -> None:
    class DropKV(Oracle):
        def score(self, row: Row) -> Mapping[int, Any]:
            lost = np.zeros(LENGTH)
            for query in range(LENGTH - 8, LENGTH):
                for head in range(2):
                    p, out = row.paid[head, query, :LENGTH], row.out[head, query]
                    lost += (p / np.maximum(1 - p, 1e-4)) ** 2 * ((row.value[:LENGTH] - out) ** 2).sum(axis=1)
            return dict(enumerate(lost))

    module = plugin("dropkv")
    module.WINDOW = 8
    check(llm, model[1], replace(module.DROPKV, keep=replace(module.DROPKV.keep, recent=8)), DropKV)


def test_expected_attention(llm: LLM, model: tuple[Path, Any]) -> None:
    def share(oracle: Oracle, row: Row) -> Array:
        dense, total = oracle._model, np.zeros(LENGTH)
        turn = np.mean(
            [dense.rotate(np.eye(dense.head_dim), LENGTH + ahead) for ahead in range(20)], axis=0
        ).T
        for head in range(dense.group):
            queries = row.query[4:LENGTH, head] / np.sqrt(dense.head_dim)
            mean, spread = turn @ queries.mean(axis=0), turn @ np.cov(queries.T, bias=True) @ turn.T
            keys = row.rotated[4:LENGTH]
            total[4:] += softmax(keys @ mean + np.einsum("ni,ij,nj->n", keys, spread, keys) / 2) / dense.group
        return total

    class Expected(Oracle):
        def score(self, row: Row) -> Mapping[int, Any]:
            most = max(share(self, each).max() for each in self.rows[row.layer])
            of = share(self, row)
            of[:4] = most
            return dict(enumerate((of + 0.01) * np.linalg.norm(row.value[:LENGTH], axis=1)))

    module = plugin("expected_attention")
    score = replace(module.EXPECTED.score, inner=module.ExpectedAttention(horizon=20))
    check(llm, model[1], replace(module.EXPECTED, score=score), Expected)


def test_compactor(llm: LLM, model: tuple[Path, Any]) -> None:
    """The sketch is as wide as a key, where it turns keys alone: leverage is then that of the keys themselves."""
    module = plugin("compactor")
    module.CHUNK, dim = 24, Llama(model[1]).head_dim

    def standard(values: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
        mean, deviation = np.mean(list(values.values())), np.std(list(values.values()), ddof=1)
        return {name: (value - mean) / deviation for name, value in values.items()}

    class Compactor(Oracle):
        def score(self, row: Row) -> Mapping[int, Any]:
            unusual, asked = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
            for each in self.rows[row.layer]:
                free = self.free(each)
                keys = each.key[free] - each.key[free].mean(axis=0)
                gram = keys.T @ keys
                leverage = np.einsum("ni,ij,nj->n", keys, np.linalg.inv(gram), keys)
                received = np.zeros(LENGTH)
                for first in range(8, LENGTH, 24):
                    tokens = range(first, min(first + 24, LENGTH))
                    for head in range(2):
                        logits = each.rotated_query[tokens, head] @ each.rotated[tokens].T
                        received[tokens] += softmax(logits).sum(axis=0) / 2
                weighed = np.zeros(LENGTH + 2)
                weighed[1:-1][free] = received[free] * np.linalg.norm(each.value[free], axis=1)
                for place, j in enumerate(free):
                    unusual[each.head, j] = leverage[place]
                    asked[each.head, j] = weighed[j : j + 3].mean()
            unusual, asked = standard(unusual), standard(asked)
            share = 1 - BUDGET / LENGTH
            scores: dict[int, Any] = dict.fromkeys(range(LENGTH), 0.0)
            return scores | {
                j: float(share * unusual[row.head, j] + asked[row.head, j]) for j in self.free(row)
            }

    check(llm, model[1], replace(module.COMPACTOR, score=module.Blend(sketch=dim, ridge=0.0)), Compactor)


def test_kvzip_plus(model: tuple[Path, Any]) -> None:
    class Plus(Oracle):
        def score(self, row: Row) -> Mapping[int, Any]:
            of = DenseSequence.scores(self, row)
            return {j: each.value for j, each in of.items()}

        def largest(self, row: Row, judged: Sequence[int], shares: Array, hidden: Array) -> Array:
            dense = self._model
            heads = range(row.head * dense.group, (row.head + 1) * dense.group)
            added = [
                np.linalg.norm(row.value[judged] @ dense.output_of(row.layer, head).T, axis=1)
                for head in heads
            ]
            return (shares * added).max(axis=0) / np.linalg.norm(dense.normed(row.layer, hidden))

    policy = plugin("kvzip_plus").KVZIP_PLUS
    for replay in (Replay(), Replay(chunk=40, starting=3)):
        with open_llm(model[0], 0, optimize=False, prefill_chunk=32) as plain:
            check(plain, model[1], replace(policy, score=replace(policy.score, asked=replay)), Plus)


@pytest.mark.parametrize(
    ("name", "changed"), [("roco", {}), ("dropkv", {}), ("scissorhands", {"history": 16})]
)
def test_with_the_moments_of_their_files(name: str, changed: Any, llm: LLM) -> None:
    policy = getattr(plugin(name), name.upper())
    policy = replace(policy, score=replace(policy.score, **changed))
    assert policy.when != When()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, eviction=policy, kv_budget=48)
    [output] = llm.generate([random.Random(1).choices(range(len(WORDS)), k=150)], params)
    assert output.outputs[0].eviction is not None and output.outputs[0].eviction.compression > 2
    llm.check_integrity()
