"""Two ranks in two processes give the tokens, and keep the KVs, of one."""

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lockstep import BLOCK, WORDS, Asked, ask, build, small
from test_codecs_in_lockstep import CODECS
from tests.architectures import ARCHITECTURES, save
from transformers import AutoConfig, AutoModelForCausalLM

from winnow import LLM, SamplingParams, llm as llm_module
from winnow.config import EngineConfig, ModelConfig
from winnow.errors import ConfigError, RankLostError, UnsupportedModelError
from winnow.eviction import PRESETS
from winnow.executor import build as engine_build
from winnow.executor.rank_team import RankTeam
from winnow.models import load_model
from winnow.process.ranks import Ranks

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


class SharedTeam(RankTeam):
    """A team that engines leave as it was, for the next one: starting a process takes seconds."""

    def close(self) -> None:
        """Wait for `end`."""

    def end(self) -> None:
        super().close()

    def entered(self) -> "SharedTeam":
        """The same, with a place of its own to meet."""
        self.directory = Path(tempfile.mkdtemp(dir=self._directory.name))
        return self


@pytest.fixture(scope="module")
def team() -> Iterator[SharedTeam]:
    team = SharedTeam(2)
    yield team
    team.end()


@pytest.fixture(autouse=True)
def shared(team: SharedTeam, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_team(config: EngineConfig) -> SharedTeam | None:
        return None if config.model.tensor_parallel_size == 1 else team.entered()

    monkeypatch.setattr(llm_module, "open_team", open_team)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build(path, 1)
    return path


def pair(path: Path, **options: Any) -> tuple[LLM, LLM]:
    """One rank, and two."""
    settings = {
        "kv_memory": "4MiB",
        "block_size": BLOCK,
        "num_accumulators": 2,
        "prefill_chunk": 48,
        "verify_model": False,
    } | options
    return LLM(path, **settings), LLM(path, tensor_parallel_size=2, **settings)


def kept(llm: LLM) -> dict[str, list[list[list[int]]]]:
    """The positions in the rows of every running sequence."""
    engine: Any = llm._engine
    return {
        f"{sequence.request.request_id}-{sequence.index}": engine._executor.kept_positions(sequence.kv.slot)
        for sequence in engine.scheduler.running
        if sequence.kv.slot is not None
    }


def compare(one: LLM, two: LLM, asked: list[Asked]) -> None:
    """Run requests on both, step by step."""
    for llm in (one, two):
        for each in asked:
            llm.submit(each.prompt, each.params)
    rounds = one.stats().num_rounds
    while one.has_unfinished:
        found, others = ({o.request_id: o for o in llm.step()} for llm in (one, two))
        assert found.keys() == others.keys()
        for name, output in found.items():
            for ours, theirs in zip(output.outputs, others[name].outputs, strict=True):
                assert ours.token_ids == theirs.token_ids
        if one.stats().num_steps % 4 == 0:  # what is gone stays gone
            assert kept(one) == kept(two)
    assert not two.has_unfinished
    two.check_integrity()
    assert one.stats().num_rounds > rounds or all(each.policy.when.never for each in asked)


@pytest.fixture(scope="module")
def plain(directory: Path, team: SharedTeam) -> Iterator[tuple[LLM, LLM]]:
    """Both, for every policy that needs no bias."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            llm_module, "open_team", lambda c: None if c.model.tensor_parallel_size == 1 else team.entered()
        )
        one, two = pair(directory, verify_model=True)
    with one, two:
        yield one, two


def asked_of(name: str) -> list[Asked]:
    rng = random.Random(name)
    policy = small(PRESETS[name].policy, rng)
    return [ask(policy, rng, answer) for answer in (21, 13)]


PLAIN = [name for name, preset in PRESETS.items() if preset.policy.compact is None]


@pytest.mark.parametrize("names", [PLAIN[n::3] for n in range(3)], ids=",".join)
def test_presets_keep_what_one_rank_keeps(names: list[str], plain: tuple[LLM, LLM]) -> None:
    """Several at the same time, in steps that they share."""
    compare(*plain, [each for name in names for each in asked_of(name)])


@pytest.mark.parametrize("name", [n for n, preset in PRESETS.items() if preset.policy.compact is not None])
def test_fitted_values_are_those_of_one_rank(name: str, directory: Path) -> None:
    one, two = pair(directory, kv_bias=True)
    with one, two:
        compare(one, two, asked_of(name))


@pytest.mark.parametrize(
    ("codec", "policy"),
    [
        ("int8 rotated", "snapkv"),
        ("k8v4", "full"),
        ("int4-outlier", "leverage"),
        ("int8 beside 16 bits", "kv-compress"),
    ],
)
def test_a_codec_stores_what_one_rank_stores(codec: str, policy: str, directory: Path) -> None:
    more = {"int8 beside 16 bits": {"kv_cache_dtype": "int8", "kv_wide": "layers=1,sinks=4,recent=8"}}
    one, two = pair(directory, **(CODECS | more)[codec])
    with one, two:
        compare(one, two, asked_of(policy))


def test_rows_of_sliding_windows(tmp_path: Path) -> None:
    save(ARCHITECTURES["gemma3"], tmp_path)
    one, two = pair(tmp_path, prefill_chunk=16)
    with one, two:
        compare(one, two, [*asked_of("ada-snapkv"), *asked_of("streaming")])


def save_tiny(kind: str, path: Path) -> Path:
    """A model of another kind with random weights."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    more = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    config = AutoConfig.for_model(kind, **sizes, **(more if "moe" in kind else {}), num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def prompt(seed: int, length: int = 60) -> list[int]:
    return random.Random(seed).choices(range(3, len(WORDS)), k=length)


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams, **more: Any) -> list[list[list[int]]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, **more)
    llm.check_integrity()
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def test_prefixes_forks_and_drafts(directory: Path) -> None:
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}}
    one, two = pair(directory, **options)
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    with one, two:
        for llm in (one, two):
            answers(llm, [prompt(1)], GREEDY)
        for params in (GREEDY, sampled):
            asked = [prompt(1), prompt(1)[:40] + prompt(2, 20)]
            assert answers(one, asked, params) == answers(two, asked, params)
        assert two.stats().cached_tokens == one.stats().cached_tokens > 0
        assert two.stats().num_accepted_tokens == one.stats().num_accepted_tokens > 0


def test_swapped_requests_go_on(directory: Path) -> None:
    """Memory for two of four requests at a time, and a host tier for the others."""
    policy = small(PRESETS["ada-snapkv"].policy, random.Random(2))
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, eviction=policy, kv_budget=40
    )
    asked = [prompt(seed) for seed in range(4)]
    common = {"block_size": BLOCK, "num_accumulators": 2, "verify_model": False}
    with LLM(directory, kv_memory="4MiB", **common) as one:
        expected = answers(one, asked, params)
    options = {"kv_memory": 150_000, "kv_offloading_size": "4MiB", "enable_prefix_caching": False}
    with LLM(directory, tensor_parallel_size=2, **common, **options) as tight:
        assert answers(tight, asked, params) == expected
        assert tight.stats().num_swaps > 0


def test_a_saved_prefix_and_a_session(directory: Path, tmp_path: Path) -> None:
    wide = {"kv_cache_dtype": "int8", "kv_wide": "sinks=4,recent=8", "kv_rotate": "none"}
    options: dict[str, Any] = {"session_memory": "1MiB", "verify_model": False} | wide
    document = prompt(7, 64)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, eviction="leverage", kv_budget=24)
    found = []
    for size in (1, 2):
        settings = {"kv_memory": "4MiB", "block_size": BLOCK, "tensor_parallel_size": size} | options
        with LLM(directory, **settings) as llm:
            llm.save_prefix({"prompt_token_ids": document}, tmp_path, params)
        with LLM(directory, prefix_store=tmp_path, **settings) as llm:
            turn = [*document, *prompt(8, 9)]
            first = answers(llm, [turn], params, session_id="a")
            second = answers(llm, [[*turn, *first[0][0], *prompt(9, 9)]], params, session_id="a")
            found.append((first, second))
            assert llm.stats().cached_tokens >= len(document)
    assert found[0] == found[1]


def test_what_is_not_cut_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="must divide the model's 2 KV heads and 4 query heads, got 3"):
        load_model(ModelConfig(directory), ranks=Ranks(0, 3))
    with pytest.raises(ConfigError, match="value_tier does not go with tensor_parallel_size above 1"):
        LLM(directory, tensor_parallel_size=2, value_tier="host:L=1,N=8")
    with pytest.raises(
        ConfigError, match="device must be auto, cpu or cuda with tensor_parallel_size above 1"
    ):
        LLM(directory, tensor_parallel_size=2, device="cuda:1")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("qwen2_moe", "parts of it are cut as"), ("gpt2", "transformers says nothing of how to cut it")],
)
def test_a_kind_of_model_that_is_not_cut(kind: str, reason: str, tmp_path: Path) -> None:
    path = save_tiny(kind, tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(ModelConfig(path), ranks=Ranks(0, 2))


def test_a_process_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RankLostError, match="rank 1 of 2 ended with exit code 1; all ranks were ended"):
        RankTeam(2)


def test_there_is_a_gpu_for_each_process(directory: Path) -> None:
    config = EngineConfig.from_options({"model": directory, "device": "cuda", "tensor_parallel_size": 1000})
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size must be at most \d+, a GPU for each process"
    ):
        engine_build.open_team(config)


# Last, since the team of all tests ends with it.
def test_a_rank_that_dies_ends_the_run(directory: Path, team: SharedTeam) -> None:
    """In the middle of an answer: one error, at once and for good, and no process is left."""
    [process] = team._processes
    with LLM(directory, tensor_parallel_size=2, kv_memory="4MiB") as llm:
        llm.submit(prompt(1), SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        for _ in range(5):
            llm.step()
        os.kill(process.pid, signal.SIGKILL)
        start = time.monotonic()
        for _ in range(2):
            with pytest.raises(RankLostError, match="rank 1 of 2 ended with signal 9; all ranks were ended"):
                while True:
                    llm.step()
        assert time.monotonic() - start < 5
    assert process.poll() == -signal.SIGKILL
    assert not team.directory.exists()
