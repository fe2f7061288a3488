"""Compressed prefixes on disk: found by another engine, and never believed when they are not what was saved."""

import errno
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, RequestOutput, SamplingParams
from winnow.errors import ConfigError, InvalidRequestError, PrefixStoreError
from winnow.eviction import EvictionPolicy, KeyNorm, When

LENGTH = 150
DOCUMENT = random.Random(7).choices(range(3, VOCAB), k=LENGTH)
KVZIP = {"eviction": "kvzip", "compression": 4.0}


def greedy(**options: object) -> SamplingParams:
    values = {
        "temperature": 0.0,
        "max_tokens": 8,
        "ignore_eos": True,
        "logprobs": 2,
        "context_tokens": LENGTH,
    }
    return SamplingParams(**(values | options))  # type: ignore[arg-type]


def open_llm(directory: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {"block_size": 4, "kv_memory": "8MiB", "kv_floor": 1, "prefill_chunk": 64}
    return LLM(directory, **(defaults | KVZIP | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a store with one prefix."""
    with open_llm(directory) as llm:
        path = llm.save_prefix(DOCUMENT, tmp_path_factory.mktemp("store"))
        llm.check_integrity()
    assert path.parent.is_dir() and list(path.parent.iterdir()) == [path]
    return path


@pytest.fixture(scope="module")
def expected(directory: Path) -> Iterator[list[RequestOutput]]:
    with open_llm(directory, enable_prefix_caching=False) as llm:
        yield ask(llm)


def ask(llm: LLM, **options: object) -> list[RequestOutput]:
    questions = [random.Random(n).choices(range(3, VOCAB), k=n) for n in (5, 20)]
    outputs = [llm.generate([DOCUMENT + each], greedy(**options))[0] for each in questions]
    llm.check_integrity()
    return outputs


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs
        reports = ours.outputs[0].eviction, theirs.outputs[0].eviction
        assert reports[0] is not None and reports[1] is not None and reports[0].kept == reports[1].kept


def test_another_engine_starts_from_what_was_saved(
    directory: Path, saved: Path, expected: list[RequestOutput]
) -> None:
    with open_llm(directory, prefix_store=saved.parent, kv_memory="4MiB", num_accumulators=2) as llm:
        found = ask(llm)
        assert [each.num_cached_tokens for each in found] == [LENGTH, LENGTH]
        assert llm.stats().replay_tokens == llm.stats().num_rounds == 0
        assert_same(found, expected)


@contextmanager
def unused(reason: str) -> Iterator[None]:
    """No request starts from the store, which is said once, with the reason."""
    with pytest.warns(UserWarning, match="no request used the prefix_store") as caught:
        yield
    [warning] = caught
    assert re.search(reason, str(warning.message)), warning.message


@pytest.mark.parametrize("context_tokens", [LENGTH, None])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compression": 5.0}, "saved with 38 KVs a row, and requests keep 30 of its 150 tokens"),
        ({"eviction": "kvzip-part"}, "another policy"),
        ({"eviction": "full", "compression": None}, "keeps all KVs"),
        ({"block_size": 8}, "another cache"),
        ({"dtype": "bfloat16"}, "another model, dtype"),
    ],
    ids=str,
)
def test_another_policy_or_cache_finds_nothing(
    directory: Path, saved: Path, options: dict[str, object], context_tokens: int | None, reason: str
) -> None:
    with unused(reason), open_llm(directory, prefix_store=saved.parent, **options) as llm:
        assert ask(llm, context_tokens=context_tokens)[0].num_cached_tokens == 0


def test_another_model_finds_nothing(directory: Path, saved: Path, tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path / "other", seed=4)
    with unused("another model"), open_llm(other, prefix_store=saved.parent) as llm:
        assert ask(llm)[0].num_cached_tokens == 0


class TestByTokens:
    """Without `context_tokens`, the longest saved document that a prompt begins with takes its place."""

    def cached(self, llm: LLM, prompt: list[int], **options: object) -> int:
        [output] = llm.generate([prompt], greedy(**({"context_tokens": None} | options)))
        return output.num_cached_tokens

    def test_a_prompt_that_begins_with_a_document_runs_as_with_context_tokens(
        self, directory: Path, saved: Path, expected: list[RequestOutput]
    ) -> None:
        with open_llm(directory, prefix_store=saved.parent) as llm:
            found = ask(llm, context_tokens=None)
            assert [each.num_cached_tokens for each in found] == [LENGTH, LENGTH]
            assert llm.stats().replay_tokens == 0
            assert_same(found, expected)

    def test_the_longest_document_wins(self, directory: Path, saved: Path, tmp_path: Path) -> None:
        shutil.copy(saved, tmp_path)
        with open_llm(directory, prefix_store=tmp_path) as llm:
            assert self.cached(llm, [*DOCUMENT[:100], 5, 6]) == 0
            llm.save_prefix(DOCUMENT[:100], tmp_path)
            assert self.cached(llm, [*DOCUMENT, 5, 6]) == LENGTH
        with open_llm(directory, prefix_store=tmp_path) as llm:
            assert self.cached(llm, [*DOCUMENT[:100], 5, 6]) == 100
            assert self.cached(llm, [*DOCUMENT, 5, 6], context_tokens=100) == 100

    def test_a_document_is_found_in_a_store_that_is_already_open(
        self, directory: Path, saved: Path, tmp_path: Path
    ) -> None:
        with open_llm(directory, prefix_store=tmp_path) as llm:
            assert self.cached(llm, [*DOCUMENT, 5, 6]) == 0
            shutil.copy(saved, tmp_path)
            assert self.cached(llm, [*DOCUMENT, 7, 8]) == LENGTH

    @pytest.mark.parametrize("place", [0, 77, LENGTH - 1])
    def test_one_other_token_is_a_miss(self, directory: Path, saved: Path, place: int) -> None:
        other = list(DOCUMENT)
        other[place] = 3 if other[place] != 3 else 4
        with unused("no prompt begins with one"), open_llm(directory, prefix_store=saved.parent) as llm:
            assert self.cached(llm, [*other, 5, 6]) == 0

    def test_nothing_behind_the_document_is_a_miss(self, directory: Path, saved: Path) -> None:
        """The policy then acts when the whole prompt is computed, with all of its logits."""
        with unused("no prompt begins with one"), open_llm(directory, prefix_store=saved.parent) as llm:
            assert self.cached(llm, DOCUMENT) == 0

    def test_a_request_keeps_to_its_own_context_tokens(self, directory: Path, saved: Path) -> None:
        with unused("give context_tokens 140"), open_llm(directory, prefix_store=saved.parent) as llm:
            [output] = llm.generate([[*DOCUMENT, 5, 6]], greedy(context_tokens=140))
            assert output.num_cached_tokens == 0
            report = output.outputs[0].eviction
            assert report is not None and report.kv_budget == 35

    def test_tenants_do_not_find_each_others(self, directory: Path, saved: Path) -> None:
        with unused("under its tenant"), open_llm(directory, prefix_store=saved.parent) as llm:
            prompt = llm.tokenize([*DOCUMENT, 5, 6, 7])
            new = llm.new_request(prompt, greedy(context_tokens=None), tenant="other", final_only=True)
            [output] = llm.driver.finish([new])
            report = output.outputs[0].eviction
            assert output.num_cached_tokens == 0 and report is not None
            assert report.kv_budget == 39  # a quarter of the whole prompt

    def test_what_would_be_refused_with_the_document_is_computed_without(
        self, directory: Path, saved: Path
    ) -> None:
        """A span behind the document may be protected only where the policy acts on the whole prompt."""
        span = ((LENGTH, LENGTH + 2),)
        with unused("protect must lie within"), open_llm(directory, prefix_store=saved.parent) as llm:
            assert self.cached(llm, [*DOCUMENT, 5, 6, 7], protect=span) == 0

    def test_a_fork_goes_on_under_the_same_policy(self, directory: Path, saved: Path) -> None:
        with open_llm(directory, prefix_store=saved.parent) as llm:
            name = llm.submit([*DOCUMENT, 5, 6], greedy(context_tokens=None))
            llm.step()
            child = llm.fork(name, greedy(context_tokens=None))
            outputs = {}
            while llm.has_unfinished:
                outputs |= {each.request_id: each for each in llm.step()}
            assert outputs[child].outputs[0].token_ids == outputs[name].outputs[0].token_ids

    def test_a_store_that_nothing_asked_for_says_nothing(self, directory: Path, saved: Path) -> None:
        with warnings.catch_warnings(), open_llm(directory, prefix_store=saved.parent):
            warnings.simplefilter("error", UserWarning)


def test_another_tenant_finds_nothing(directory: Path, saved: Path) -> None:
    with open_llm(directory, prefix_store=saved.parent) as llm:
        for tenant, hits in (("other", 0), (None, LENGTH)):
            prompt = llm.tokenize([*DOCUMENT, 5, 6, 7])
            [output] = llm.driver.finish([llm.new_request(prompt, greedy(), tenant=tenant, final_only=True)])
            assert output.num_cached_tokens == hits


def flipped(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 4
    path.write_bytes(content)


def rewritten(path: Path, **changes: object) -> None:
    """Another content under the digest of the first, as one who tampers would leave it."""
    with safe_open(path, framework="numpy") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors | changes, path, metadata)  # type: ignore[arg-type]


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "truncated in the header": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "empty": lambda path: path.write_bytes(b""),
    "no safetensors": lambda path: path.write_bytes(b"a" * 1000),
    "a bit in the KVs": lambda path: flipped(path, 0.5),
    "a bit at the end": lambda path: flipped(path, 0.9999),
    "a bit in the header": lambda path: flipped(path, 0.004),
    "other tokens": lambda path: rewritten(path, token_ids=np.arange(LENGTH, dtype=np.int64)),
    "other lengths": lambda path: rewritten(path, lengths=np.full((2, 2), 40, dtype=np.int32)),
    "more": lambda path: rewritten(path, more=np.zeros(3, dtype=np.float32)),
    "no metadata": lambda path: save_file({"kvs.0": np.zeros(3, dtype=np.uint8)}, path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_with_a_warning(
    directory: Path, saved: Path, expected: list[RequestOutput], tmp_path: Path, damage: str
) -> None:
    copy = tmp_path / saved.name
    shutil.copy(saved, copy)
    DAMAGE[damage](copy)
    with pytest.warns(UserWarning) as caught, open_llm(directory, prefix_store=tmp_path) as llm:
        found = ask(llm)
        assert found[0].num_cached_tokens == 0
        assert_same(found, expected)
    said = [str(each.message) for each in caught]
    assert saved.stem in said[0]
    # When the engine is closed; why depends on where the bit lies, as the order of names in a header does.
    assert all("no request used the prefix_store" in each for each in said[1:])


def test_a_file_under_the_name_of_another_is_a_miss(directory: Path, saved: Path, tmp_path: Path) -> None:
    with open_llm(directory, compression=5.0) as llm:
        foreign = llm.save_prefix(DOCUMENT, tmp_path)
    assert foreign.name != saved.name
    foreign.rename(tmp_path / saved.name)
    with open_llm(directory, prefix_store=tmp_path) as llm, pytest.warns(UserWarning, match="another model"):
        assert ask(llm)[0].num_cached_tokens == 0


@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_llm(directory) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(os if operation == "fsync" else Path, operation, full)
            with pytest.raises(
                PrefixStoreError, match=r"cannot save a prefix in .*: No space left on device"
            ):
                llm.save_prefix(DOCUMENT, tmp_path)
        assert not list(tmp_path.iterdir())
        llm.check_integrity()
        assert llm.save_prefix(DOCUMENT, tmp_path).is_file()


def test_what_lies_behind_the_rows_is_not_written(directory: Path, tmp_path: Path) -> None:
    with open_llm(directory) as llm:
        path = llm.save_prefix(DOCUMENT, tmp_path, SamplingParams(eviction="knorm", kv_budget=38))
    with safe_open(path, framework="numpy") as file:
        lengths, positions, kvs = (file.get_tensor(name) for name in ("lengths", "positions.0", "kvs.0"))
    counts = (-(-lengths // 4)).ravel()
    rest = lengths.ravel() % 4
    tails = (counts.cumsum() - 1)[rest > 0]
    assert len(tails), "some rows end within a block"
    for tail, filled in zip(tails, rest[rest > 0], strict=True):
        assert not positions[tail, filled:].any()
        fields = kvs[tail].view(np.float32).reshape(2, 4, 8)  # keys and values of 4 slots
        assert not fields[:, filled:].any() and fields[:, :filled].any()


def test_too_little_memory_is_a_miss(directory: Path, saved: Path) -> None:
    """What a request holds is not taken for a prefix; afterwards it is there."""
    with open_llm(directory, prefix_store=saved.parent, kv_memory="1MiB") as llm:
        assert ask(llm)[1].num_cached_tokens == LENGTH


class Mine(KeyNorm):
    pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"eviction": "full", "compression": None}, "less than all"),
        ({"compression": 1.0}, "less than all"),
        ({"eviction": EvictionPolicy(score=Mine(), when=When(after_prefill=True))}, "Winnow's own"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching"),
    ],
    ids=["full", "budget", "own", "off"],
)
def test_what_cannot_be_saved_is_refused(
    directory: Path, tmp_path: Path, options: dict[str, object], reason: str
) -> None:
    with open_llm(directory, **options) as llm, pytest.raises(PrefixStoreError, match=reason):
        llm.save_prefix(DOCUMENT, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_store_must_be_a_directory_and_needs_the_prefix_cache(directory: Path, saved: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_store must be a directory"):
        open_llm(directory, prefix_store=saved)
    with pytest.raises(ConfigError, match="prefix_store needs enable_prefix_caching"):
        open_llm(directory, prefix_store=saved.parent, enable_prefix_caching=False)
    with open_llm(directory) as llm, pytest.raises(InvalidRequestError):
        llm.save_prefix([], saved.parent)
