"""Logits that are not finite: the request that has them fails by name, and no other notices."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import save_tiny_llama
from transformers import AutoModelForCausalLM, PhiConfig

from winnow import LLM, SamplingParams
from winnow.cli.main import main
from winnow.errors import RequestFailedError
from winnow.outputs import RequestOutput
from winnow_lab.evaluate.likelihood import Pair, score_pairs

NAN_TOKEN, INFINITE_TOKEN, HUGE_TOKEN = 50, 51, 52
HEALTHY = [[7, 8, 9], [10, 11, 12, 13, 14, 15, 16], [20], [21, 22] * 10]
ENGINES: list[dict[str, Any]] = [
    {"attention_backend": "reference", "optimize": False},
    {"attention_backend": "native"},
    {"kv_cache_dtype": "k=int8,v=int4-outlier"},
    {"kv_cache_dtype": "int4", "kv_rotate": "kv", "kv_wide": "sinks=1,recent=4"},
]
IDS = ["reference", "native", "k8v4", "int4 wide"]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which three tokens' embeddings are NaN, infinite, and beyond float16."""
    path = save_tiny_llama(tmp_path_factory.mktemp("faulty"), seed=3)
    weights = load_file(path / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    table[NAN_TOKEN], table[INFINITE_TOKEN] = torch.nan, torch.inf
    table[HUGE_TOKEN] = 1e5
    weights["lm_head.weight"][NAN_TOKEN : HUGE_TOKEN + 1] = 0  # no answer says them
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module", params=ENGINES, ids=IDS)
def llm(faulty: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """One of each engine for all tests, as one that lives on."""
    with open_llm(faulty, **request.param) as llm:
        yield llm
        llm.check_integrity()
        assert not llm.has_unfinished


def open_llm(path: Path, **options: Any) -> LLM:
    if options.get("attention_backend") == "native":
        pytest.importorskip("winnow._native")
    return LLM(path, **{"kv_memory": "1MiB", "max_num_seqs": 4, "max_model_len": 128} | options)


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_a_request_fails_alone(llm: LLM) -> None:
    """Requests come into rows and blocks in which others have left NaN."""
    sick = [[5, NAN_TOKEN], [INFINITE_TOKEN] * 5, [6] * 9 + [NAN_TOKEN] + [6] * 9]
    mixed = [prompt for pair in zip(sick, HEALTHY, strict=False) for prompt in pair] + HEALTHY[3:]
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5, "top_k": 5},
        {"logprobs": 2, "repetition_penalty": 1.1},
        {"logit_bias": {3: 2.0}},
        {"forced_tokens": [5, 6, 7], "logprobs": 0},
    ]
    asked = [replace(GREEDY, **way) for way in ways]
    alone = [answers(llm.generate(HEALTHY, params)) for params in asked]
    for params, expected in zip([*asked, asked[0]], [*alone, alone[0]], strict=True):
        outputs = llm.generate(mixed, params)
        healthy = [*outputs[1:6:2], *outputs[6:]]
        assert [output.error for output in healthy] == [None] * 4, params
        assert answers(healthy) == expected, params
        for output in outputs[0:6:2]:
            [answer] = output.outputs
            assert answer.finish_reason == "error" and answer.token_ids == [] and output.finished
            assert answer.error == output.error is not None
            assert "not finite" in answer.error and "float32" in answer.error
    llm.check_integrity()
    assert not llm.has_unfinished


def test_a_forced_token_spoils_an_answer_that_has_begun(llm: LLM) -> None:
    """Each of several samples fails by itself, with what it had."""
    params = SamplingParams(
        n=3, temperature=0, max_tokens=6, ignore_eos=True, forced_tokens=[[5, NAN_TOKEN, 6], [5, 6, 7], []]
    )
    [output] = llm.generate([7, 8], params)
    assert [answer.finish_reason for answer in output.outputs] == ["error", "length", "length"]
    assert output.outputs[0].token_ids == [5, NAN_TOKEN]
    assert output.error is not None and len(output.outputs[1].token_ids) == 6
    llm.check_integrity()


# KVs in float16 and in codes.
@pytest.mark.parametrize("options", [ENGINES[1], ENGINES[3]], ids=[IDS[1], IDS[3]])
def test_overflow_in_float16_suggests_bfloat16(faulty: Path, options: dict[str, Any]) -> None:
    prompts = [[7, HUGE_TOKEN], [7, 8]]
    with open_llm(faulty, dtype="float16", **options) as llm:
        sick, healthy = llm.generate(prompts, GREEDY)
    assert healthy.error is None and len(healthy.outputs[0].token_ids) == 8
    assert sick.error is not None and "float16" in sick.error and "bfloat16" in sick.error
    with open_llm(faulty, dtype="bfloat16", **options) as llm:
        assert [output.error for output in llm.generate(prompts, GREEDY)] == [None, None]


def test_prompt_logprobs_that_are_no_numbers_fail_the_request(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    sick, healthy = llm.generate([[7, NAN_TOKEN, 9, 10], [7, 8]], params)
    assert sick.error is not None and healthy.error is None


def test_every_token_ruled_out_by_the_request(llm: LLM) -> None:
    everything = SamplingParams(temperature=0, min_tokens=1, max_tokens=2, stop_token_ids=range(97))
    sick, healthy = llm.generate([[7, 8], [7, 8]], [everything, GREEDY])
    assert sick.error is not None and "min_tokens" in sick.error and "finite" not in sick.error
    assert healthy.error is None


def test_a_run_writes_the_error_and_goes_on(faulty: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": [7, 8], "max_tokens": 3},
        {"prompt": [7, NAN_TOKEN], "max_tokens": 3},
        {"prompt": [9], "max_tokens": 3, "n": 2},
    ]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["run", str(prompts), "-o", str(out), "--model", str(faulty), "--kv-memory", "1MiB"]
    assert main([*command, "--progress", "off"]) == 1
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [("error" in record) for record in records] == [False, True, False]
    error = records[1]["error"]
    assert error["line"] == 2 and error["code"] == "request_failed" and "not finite" in error["message"]


def test_generate_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from winnow.models.load.loader import DEMO_MODEL

    for file in DEMO_MODEL.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("norm.weight"))
    weights[name][:] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert main(["generate", "Once", "--model", str(tmp_path), "--kv-memory", "4MiB"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("winnow: error: ") and "not finite" in error


@pytest.mark.parametrize("options", [ENGINES[1]], ids=[IDS[1]])
def test_a_token_that_the_model_rules_out(tmp_path: Path, options: dict[str, Any]) -> None:
    """By a bias of minus infinity: it is never said, and where it is forced its logprob is minus infinity."""
    ruled_out = 33
    torch.manual_seed(5)
    config = PhiConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.lm_head.bias.data[ruled_out] = -torch.inf
    model.save_pretrained(tmp_path)
    cases = [
        GREEDY,
        SamplingParams(n=4, temperature=5.0, seed=1, max_tokens=40, ignore_eos=True, logprobs=3),
        SamplingParams(temperature=0, max_tokens=3, forced_tokens=[8, ruled_out], logprobs=1),
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1),
    ]
    prompts = [[5, 6], [5, 6], [5, 6], [5, ruled_out, 6]]
    with open_llm(tmp_path, **options) as llm:
        outputs = llm.generate(prompts, cases)
    assert [output.error for output in outputs] == [None] * 4
    for answer in outputs[1].outputs:
        assert ruled_out not in answer.token_ids
        assert answer.cumulative_logprob is not None and math.isfinite(answer.cumulative_logprob)
    [forced] = outputs[2].outputs
    assert forced.cumulative_logprob == -math.inf and forced.logprobs is not None
    report = forced.logprobs[1]
    assert report is not None and report[ruled_out].logprob == -math.inf and report[ruled_out].rank == 97
    assert outputs[3].prompt_logprobs is not None and outputs[3].prompt_logprobs[1] is not None
    assert outputs[3].prompt_logprobs[1][ruled_out].logprob == -math.inf


def test_a_model_without_finite_logits_is_refused_by_name_where_it_is_tried(tmp_path: Path) -> None:
    path = save_tiny_llama(tmp_path, seed=3)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][:] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def test_nothing_is_measured_on_a_failed_answer(faulty: Path) -> None:
    with open_llm(faulty) as llm:
        with pytest.raises(RequestFailedError, match="not finite"):
            list(score_pairs(llm, [Pair((7, 8), (9,)), Pair((7, NAN_TOKEN), (9, 10))]))
        with pytest.raises(RequestFailedError, match="not finite"):
            llm.inspect([7, NAN_TOKEN])
        assert not llm.has_unfinished
