"""Perplexity by forced decoding: the windows, the numbers, and what continues an earlier call."""

import gzip
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, SamplingParams
from winnow.errors import DatasetError, EvaluationError, InvalidRequestError
from winnow.eviction import PRESETS
from winnow.values.eviction_request import Amount
from winnow_lab.evaluate.likelihood import Keeping, Pair
from winnow_lab.evaluate.perplexity import Perplexity, WindowScore, measure_perplexity
from winnow_lab.evaluate.wikitext import cut_windows, wikitext

RECENT = Keeping(PRESETS["recent"].policy, Amount(kv_budget=32))
KEEPINGS = {
    "full": Keeping(),
    "recent": RECENT,
    "once": Keeping(PRESETS["random"].policy, Amount(compression=4.0)),
}


class Words:
    """A tokenizer that gives every word the id of its length."""

    def __init__(self, bos: int | None) -> None:
        self.bos_token_id = bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        front = [] if self.bos_token_id is None or not add_special_tokens else [self.bos_token_id]
        return front + [len(word) for word in text.split()]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = save_tiny_llama(tmp_path_factory.mktemp("model"), seed=11)
    with LLM(directory, dtype="float32", kv_memory="8MiB", block_size=4, kv_floor=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def windows() -> list[Pair]:
    draw = random.Random(3)
    return [
        Pair(tuple(draw.choices(range(3, VOCAB), k=80)), tuple(draw.choices(range(3, VOCAB), k=40)))
        for _ in "123"
    ]


class TestWindows:
    def test_they_follow_each_other_and_begin_as_texts_do(self) -> None:
        text = " ".join("x" * n for n in range(1, 12))
        assert cut_windows(Words(99), text, 5, 3) == [Pair((99, 1, 2), (3, 4)), Pair((99, 5, 6), (7, 8))]
        plain = cut_windows(Words(None), text, 5, 3)
        assert plain == [Pair((1, 2, 3), (4, 5)), Pair((6, 7, 8), (9, 10))]
        assert cut_windows(Words(None), text, 5, 3, most=1) == plain[:1]
        assert cut_windows(Words(None), text, 5, 3, most=9) == plain

    @pytest.mark.parametrize(("length", "context"), [(5, 0), (5, 5), (5, 7)])
    def test_refused(self, length: int, context: int) -> None:
        with pytest.raises(EvaluationError, match=f"a window of {length} tokens, got {context}"):
            cut_windows(Words(None), "a b c d e", length, context)

    def test_a_short_text(self) -> None:
        with pytest.raises(EvaluationError, match="the text has 5 tokens, which is less than a window of 6"):
            cut_windows(Words(None), "a b c d e", 6, 3)


class TestText:
    def test_articles_ship(self) -> None:
        text = wikitext()
        assert text.count("\n = ") > 4 and "Du Fu" in text and "<unk>" in text

    @pytest.mark.parametrize("name", ["test.txt", "wiki.test.tokens"])
    def test_the_whole_split_from_a_directory(self, tmp_path: Path, name: str) -> None:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b" = Title = \n"))
        assert wikitext(tmp_path) == " = Title = \n"

    def test_what_is_missing_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match=r"no file test.txt .*WikiText"):
            wikitext(tmp_path)
        (tmp_path / "test.txt").write_text(" \n")
        with pytest.raises(DatasetError, match=r"test\.txt holds no text"):
            wikitext(tmp_path)


class TestMeasure:
    def test_the_full_cache_is_that_of_one_pass(self, llm: LLM, windows: list[Pair]) -> None:
        [full] = measure_perplexity(llm, windows, {"full": Keeping()})
        nats = 0.0
        for window in windows:
            whole = [*window.context, *window.continuation]
            [output] = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0))
            logprobs = (output.prompt_logprobs or [])[len(window.context) :]
            nats -= sum(
                found[token].logprob
                for token, found in zip(window.continuation, logprobs, strict=True)
                if found
            )
        assert full.tokens == 120
        assert full.value == pytest.approx(math.exp(nats / 120), rel=1e-4)
        assert (full.mean_kept, full.kv_bytes) == (119, llm.kv_bytes(119))

    def test_eviction_shows_while_the_text_is_forced(self, llm: LLM, windows: list[Pair]) -> None:
        full, recent, once = measure_perplexity(llm, windows, KEEPINGS)
        assert [each.name for each in (full, recent, once)] == list(KEEPINGS)
        assert recent.mean_kept == 33 and once.mean_kept == 20 + 40
        # One before the context's last token, then one after each forced token that is computed but the last.
        assert [score.rounds for score in recent.scores] == [1 + 38] * 3
        assert [score.rounds for score in once.scores] == [1] * 3
        assert len({each.value for each in (full, recent, once)}) == 3
        change = recent.over(full)
        assert change is not None and change.error is not None and recent.value is not None
        assert change.ratio == pytest.approx(recent.value / full.value)  # type: ignore[operator]

    def test_known_scores_are_not_computed_again(self, llm: LLM, windows: list[Pair]) -> None:
        new: list[WindowScore] = []
        first = measure_perplexity(llm, windows, KEEPINGS, on_score=new.append)
        assert len(new) == 9
        again: list[WindowScore] = []
        kept = [WindowScore.from_json(score.to_json()) for score in new[:4]]
        assert measure_perplexity(llm, windows, KEEPINGS, known=kept, on_score=again.append) == first
        assert sorted((score.name, score.window) for score in kept + again) == sorted(
            (score.name, score.window) for score in new
        )

    def test_a_way_that_the_engine_refuses_says_why(self, llm: LLM, windows: list[Pair]) -> None:
        small = Keeping(PRESETS["snapkv"].policy, Amount(kv_budget=8))
        full, refused = measure_perplexity(llm, windows, {"full": Keeping(), "small": small})
        assert full.value is not None and refused.value is None and refused.over(full) is None
        assert "protected set" in (refused.refusal or "")
        assert refused.to_json() == {"name": "small", "refused": refused.refusal}
        with pytest.raises(InvalidRequestError, match="protected set"):
            measure_perplexity(llm, windows, {"small": small})


def test_change_and_its_error() -> None:
    def under(name: str, nats: list[float]) -> Perplexity:
        return Perplexity(
            name, tuple(WindowScore(name, i, each, 10, 5.0, 8, 0) for i, each in enumerate(nats))
        )

    full, other = under("full", [20.0, 30.0]), under("other", [21.0, 32.0])
    change = other.over(full)
    assert full.value == pytest.approx(math.exp(2.5)) and other.value == pytest.approx(math.exp(2.65))
    assert change is not None and change.ratio == pytest.approx(math.exp(0.15))
    # Nats per token rise by 0.1 and 0.2: their standard error is 0.05.
    assert change.error == pytest.approx(math.exp(0.15) * 0.05)
    alone = under("one", [21.0]).over(under("full", [20.0]))
    assert alone is not None and alone.error is None
