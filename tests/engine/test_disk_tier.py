"""Prefixes that go to disk by themselves: found after a restart and by others, and never a wrong answer."""

import errno
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import save
from hybrids import HYBRIDS
from hypothesis import given, strategies as st
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, RequestOutput, SamplingParams
from winnow.errors import ConfigError
from winnow.storage import folders
from winnow.storage.folders import open_folder
from winnow.storage.prefix_files import DiskPart, PrefixFiles, run_key
from winnow.storage.prefix_format import PrefixFormat
from winnow.values.disk_stats import DiskTierStats

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
KVZIP: dict[str, Any] = {"eviction": "kvzip", "compression": 4.0, "kv_floor": 1, "prefill_chunk": 32}

WIDE: dict[str, Any] = {
    "kv_cache_dtype": "k=int8,v=int4",
    "kv_wide": "layers=1,sinks=2,recent=8",
    "max_model_len": 512,
    "max_num_seqs": 4,
}


def prompt(length: int, seed: int = 7) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    save(HYBRIDS["qwen3.5"], path)
    return path


def open_llm(directory: Path, cache: Path | str | None, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"block_size": 4, "kv_memory": "8MiB", "prefix_cache_dir": cache}
    return LLM(directory, **(defaults | options))


def ask(llm: LLM, tokens: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    [output] = llm.generate([tokens], params)
    llm.check_integrity()
    return output


def tier_stats(llm: LLM) -> DiskTierStats:
    found = llm.stats().disk_tier
    assert found is not None
    return found


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.safetensors"))


def converse(llm: LLM, turns: int) -> tuple[list[int], list[RequestOutput]]:
    tokens, outputs = prompt(50), []
    for turn in range(turns):
        tokens = tokens + prompt(20, turn)
        outputs.append(ask(llm, tokens))
        tokens = tokens + outputs[-1].outputs[0].token_ids
    return tokens, outputs


@pytest.mark.parametrize(
    "options", [{}, WIDE, {"value_tier": "host:L=1,N=64"}], ids=["plain", "wide", "value-tier"]
)
def test_a_conversation_goes_on_after_a_restart(
    options: dict[str, Any], directory: Path, tmp_path: Path
) -> None:
    with open_llm(directory, None, **options) as llm:
        tokens, expected = converse(llm, 3)
        last = ask(llm, tokens)
    for turn in range(3):
        with open_llm(directory, tmp_path / "cache", **options) as llm:
            _, found = converse(llm, turn + 1)
            assert [each.outputs[0].token_ids for each in found] == [
                each.outputs[0].token_ids for each in expected[: turn + 1]
            ]
    with open_llm(directory, tmp_path / "cache", **options) as llm:
        found = [ask(llm, tokens)]
        assert found[0].outputs[0].token_ids == last.outputs[0].token_ids
        # A tail comes from disk whole or not at all, where the index may take its first tokens.
        assert last.num_cached_tokens - 16 < found[0].num_cached_tokens <= last.num_cached_tokens
        assert last.num_cached_tokens > len(tokens) - 20
        assert tier_stats(llm).loaded_tokens == found[0].num_cached_tokens


def test_states_of_layers_come_back_too(hybrid: Path, tmp_path: Path) -> None:
    with open_llm(hybrid, None) as llm:
        tokens, _ = converse(llm, 3)
        expected = ask(llm, tokens)
    with open_llm(hybrid, tmp_path) as llm:
        converse(llm, 3)
    with open_llm(hybrid, tmp_path) as llm:
        found = ask(llm, tokens)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.num_cached_tokens == expected.num_cached_tokens == len(tokens) - 1


def test_what_rounds_left_comes_back(directory: Path, tmp_path: Path) -> None:
    document, options = prompt(150), KVZIP | {"kv_memory": "4MiB"}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2, context_tokens=150)
    questions = [prompt(5, 1), prompt(20, 2)]
    with open_llm(directory, None, enable_prefix_caching=False, **options) as llm:
        expected = [ask(llm, document + each, params) for each in questions]
    with open_llm(directory, tmp_path, **options) as llm:
        ask(llm, document + questions[0], params)
    with open_llm(directory, tmp_path, **options) as llm:
        found = [ask(llm, document + each, params) for each in questions]
        assert llm.stats().num_rounds == llm.stats().replay_tokens == 0
    assert [each.num_cached_tokens for each in found] == [150, 150]
    assert [each.outputs[0].logprobs for each in found] == [each.outputs[0].logprobs for each in expected]
    with open_llm(directory, tmp_path, **options | {"compression": 5.0}) as llm:
        assert ask(llm, document + questions[0], params).num_cached_tokens == 148  # before the round
        assert llm.stats().num_rounds == 1


def test_only_the_tenant_finds_its_prefix(directory: Path, tmp_path: Path) -> None:
    for tenant, cached in (("ada", 0), ("ben", 0), ("ada", 148)):
        with open_llm(directory, tmp_path) as llm:
            [output] = llm.generate([prompt(150)], GREEDY, tenant=tenant)
            assert output.num_cached_tokens == cached


def test_a_branch_takes_the_blocks_before_it(directory: Path, tmp_path: Path) -> None:
    with open_llm(directory, tmp_path) as llm:
        ask(llm, prompt(150))
    with open_llm(directory, tmp_path) as llm:
        assert ask(llm, prompt(90) + prompt(9, 1)).num_cached_tokens == 88


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_half(
    directory: Path, tmp_path: Path
) -> None:
    with open_llm(directory, tmp_path / "other") as llm:
        form, expected = (llm._engine._model.prefix_format(), [ask(llm, prompt(150, 7 + n)) for n in (0, 1)])
    given = [(path.name, path.read_bytes()) for path in files(tmp_path / "other")]
    cache = tmp_path / "cache"
    with open_llm(directory, cache) as llm:
        child = os.fork()
        if not child:  # another process on the same folder: it writes one file, and half of another
            try:
                tier = PrefixFiles(open_folder(cache), 2**20, form)
                folders.write_whole(cache / given[0][0], given[0][1], 0o600)
                os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
                with tier._folder.locked():
                    folders.write_whole(cache / given[1][0], given[1][1][:-1000], 0o600)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert len(files(cache)) == 1 and len(list(cache.glob(".*.safetensors.*"))) == 1
        # What another process has written whole is found, without a restart.
        found = [ask(llm, prompt(150, 7 + n)) for n in (0, 1)]
        assert sorted(each.num_cached_tokens for each in found) == [0, 148]
    assert not list(cache.glob(".*.safetensors.*")), "what was left unfinished is deleted"
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


def test_the_least_recently_used_go_first(directory: Path, tmp_path: Path) -> None:
    with open_llm(directory, tmp_path / "one") as llm:
        ask(llm, prompt(150, 0))
    size = files(tmp_path / "one")[0].stat().st_size
    cache = tmp_path / "cache"
    for seed in (0, 1, 0, 2):
        with open_llm(directory, cache, prefix_cache_disk=int(2.5 * size)) as llm:
            ask(llm, prompt(150, seed))
            llm._engine.scheduler.memory.files.cached.wait()
            assert tier_stats(llm).bytes_used <= 2.5 * size
    assert tier_stats_after(directory, cache, [0, 1, 2]) == [148, 0, 148]


def tier_stats_after(directory: Path, cache: Path, seeds: list[int]) -> list[int]:
    with open_llm(directory, cache, prefix_cache_disk=1) as llm:  # which leaves no room to write
        return [ask(llm, prompt(150, seed)).num_cached_tokens for seed in seeds]


def test_a_full_disk_ends_writing_and_nothing_else(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes, mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders, "write_whole", refuse)
    with (
        pytest.warns(
            UserWarning, match="refuses a file, so none is written for 10 seconds: No space left"
        ) as caught,
        open_llm(directory, tmp_path) as llm,
    ):
        outputs = [ask(llm, prompt(150, seed)) for seed in range(3)]
        llm._engine.scheduler.memory.files.cached.wait()
        assert not tier_stats(llm).is_writing and not files(tmp_path)
        assert llm._engine.scheduler.memory.files.cached.pending_bytes == 0
    assert len(caught) == 1 and all(each.outputs[0].finish_reason == "length" for each in outputs)


def test_a_directory_that_was_deleted_is_made_again(directory: Path, tmp_path: Path) -> None:
    with open_llm(directory, tmp_path / "cache") as llm:
        for seed in range(2):
            ask(llm, prompt(150, seed))
            llm._engine.scheduler.memory.files.cached.wait()
            assert len(files(tmp_path / "cache")) == 1
            shutil.rmtree(tmp_path / "cache")


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let every read of a file take longer."""
    read = PrefixFormat.read

    def slowly(*args: Any) -> Any:
        time.sleep(seconds)
        return read(*args)

    monkeypatch.setattr(PrefixFormat, "read", slowly)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_what_memory_loses_while_a_request_waits_is_read(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Turns of many conversations at once, in memory for few: no token is computed twice, however slow the disk."""
    slow_down(monkeypatch, seconds)
    conversations = [prompt(100, seed) for seed in range(8)]
    with open_llm(directory, None) as llm:
        room = 3 * llm.kv_bytes(200)
    with open_llm(directory, tmp_path, kv_memory=room, max_num_seqs=2) as llm:
        for turn in range(3):
            outputs = llm.generate(conversations, GREEDY)
            llm.check_integrity()
            llm._engine.scheduler.memory.files.cached.wait()
            for number, output in enumerate(outputs):
                known = 0 if not turn else len(conversations[number]) - 20
                assert output.num_cached_tokens >= known - 4, (turn, number)
                conversations[number] += output.outputs[0].token_ids + prompt(20, turn)
        assert tier_stats(llm).loaded_tokens > 8 * 100


def test_others_are_served_while_a_prefix_is_read(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(directory, tmp_path) as llm:
        ask(llm, prompt(150))
    slow_down(monkeypatch, 0.2)
    with open_llm(directory, tmp_path) as llm:
        outputs = llm.generate([prompt(150), prompt(20, 1)], GREEDY)
        llm.check_integrity()
    assert [each.num_cached_tokens for each in outputs] == [148, 0]
    first = [each.metrics.first_token_time for each in outputs]
    assert first[0] is not None and first[1] is not None and first[1] < first[0]


def test_urls_need_a_plugin(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.process.extras.entry_points", lambda **_: ())
    with pytest.raises(ConfigError, match="a s3 URL needs winnow-stores: in a checkout"):
        open_llm(directory, "s3://bucket/prefixes")


# -- files that are not what was written -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Path]]:
    """An engine, and the one file that it has written."""
    cache = tmp_path_factory.mktemp("cache")
    with open_llm(directory, cache) as llm:
        ask(llm, prompt(40))
        llm._engine.scheduler.memory.files.cached.wait()
        [path] = files(cache)
        yield llm, path


@given(st.data())
def test_no_damaged_file_is_believed(written: tuple[LLM, Path], data: st.DataObject) -> None:
    llm, path = written
    form = llm._engine._model.prefix_format()
    [file] = llm._engine.scheduler.memory.files.cached._files.values()
    tokens = [*prompt(40), *ask(llm, prompt(40)).outputs[0].token_ids]
    part = DiskPart(file, run_key(file.links), tokens[: sum(link.num_tokens for link in file.links)])
    content = path.read_bytes()
    cache = path.parent / "damaged"
    cache.mkdir(exist_ok=True)
    cut = data.draw(st.integers(0, len(content)) | st.none())
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 1000))
    flipped = bytes([content[at] ^ (1 << data.draw(st.integers(0, 7)))])
    (cache / path.name).write_bytes((content[:at] + flipped + content[at + 1 :])[:cut])
    tier = PrefixFiles(open_folder(cache), 2**20, form)
    found = tier.read([part]).result()
    stats = tier.stats()
    tier.close()
    if found:  # what was changed is neither a tensor nor the header, such as a space behind it
        read = partial(open_folder(path.parent).read, path.name)
        whole = form.read(read, part.key, part.token_ids, 0)
        assert np.array_equal(found[0].data, whole.data)
    else:
        assert stats.num_damaged + stats.num_foreign > 0 and not stats.num_files


def test_a_damaged_file_is_computed_again(directory: Path, tmp_path: Path) -> None:
    with open_llm(directory, tmp_path) as llm:
        expected = ask(llm, prompt(150))
    [path] = files(tmp_path)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    (tmp_path / "notes.txt").write_text("not ours")
    with open_llm(directory, tmp_path) as llm:
        found = ask(llm, prompt(150))
        assert found.num_cached_tokens == 0 and tier_stats(llm).num_damaged == 1
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    with open_llm(directory, tmp_path) as llm:  # it was written again
        assert ask(llm, prompt(150)).num_cached_tokens == 148
    assert (tmp_path / "notes.txt").read_text() == "not ours"


def test_another_model_finds_nothing_and_deletes_nothing(directory: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with open_llm(directory, cache) as llm:
        ask(llm, prompt(150))
    other = save_tiny_llama(tmp_path / "other", seed=4)
    with open_llm(other, cache) as llm:
        assert ask(llm, prompt(150)).num_cached_tokens == 0 and tier_stats(llm).num_foreign == 1
        llm.reset_prefix_cache()
        assert tier_stats(llm).num_files == 0
    assert tier_stats_after(directory, cache, [7]) == [148]


def test_what_cannot_be_used_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("short")
    for options, reason in (
        ({"prefix_cache_dir": tmp_path / "file"}, "prefix_cache_dir: cannot use"),
        ({"prefix_cache_dir": tmp_path, "enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"prefix_cache_dir": tmp_path, "prefix_store": tmp_path}, "another directory than prefix_store"),
        ({"prefix_cache_dir": tmp_path, "prefix_cache_disk": 0}, "prefix_cache_disk must be at least 1 byte"),
    ):
        with pytest.raises(ConfigError, match=reason), warnings.catch_warnings():
            open_llm(directory, None, **options)
