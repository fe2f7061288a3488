"""Every field of SamplingParams: its default, its limits, and what the user reads when a limit is broken."""

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest

from winnow.errors import InvalidRequestError
from winnow.sampling import SamplingParams

NAN, INF = float("nan"), float("inf")

BAD = [
    ("n", 0, "n must be at least 1, got 0"),
    ("n", 129, "n must be at most 128, got 129"),
    ("n", True, "n must be an integer, got True"),
    ("n", 1.0, "n must be an integer, got 1.0"),
    ("n", "2", "n must be an integer, got '2'"),
    ("n", None, "n must be an integer, got None"),
    ("temperature", -1.0, "temperature must be at least 0, got -1.0"),
    ("temperature", 101, "temperature must be at most 100.0, got 101"),
    ("temperature", NAN, "temperature must be finite, got nan"),
    ("temperature", INF, "temperature must be finite, got inf"),
    ("temperature", True, "temperature must be a number, got True"),
    ("temperature", "hot", "temperature must be a number, got 'hot'"),
    ("temperature", 1j, "temperature must be a number, got 1j"),
    ("temperature", 10**400, "temperature must be at most 100.0, got 1"),
    ("top_p", 0, "top_p must be greater than 0, got 0.0"),
    ("top_p", -0.1, "top_p must be at least 0, got -0.1"),
    ("top_p", 1.1, "top_p must be at most 1, got 1.1"),
    ("top_p", NAN, "top_p must be finite, got nan"),
    ("top_k", -2, "top_k must be at least -1, got -2"),
    ("top_k", 0.5, "top_k must be an integer, got 0.5"),
    ("min_p", -0.1, "min_p must be at least 0, got -0.1"),
    ("min_p", 1.5, "min_p must be at most 1, got 1.5"),
    ("min_p", -INF, "min_p must be finite, got -inf"),
    ("repetition_penalty", 0, "repetition_penalty must be at least 0.01, got 0"),
    ("repetition_penalty", 1000.0, "repetition_penalty must be at most 100.0, got 1000.0"),
    ("repetition_penalty", NAN, "repetition_penalty must be finite, got nan"),
    ("presence_penalty", -2.5, "presence_penalty must be at least -2.0, got -2.5"),
    ("presence_penalty", 2.5, "presence_penalty must be at most 2.0, got 2.5"),
    ("frequency_penalty", -2.5, "frequency_penalty must be at least -2.0, got -2.5"),
    ("frequency_penalty", 2.5, "frequency_penalty must be at most 2.0, got 2.5"),
    ("logit_bias", [1], "logit_bias must map token ids to numbers, got [1]"),
    ("logit_bias", {1: 101}, "logit_bias of token 1 must be at most 100.0, got 101"),
    ("logit_bias", {1: -101.0}, "logit_bias of token 1 must be at least -100.0, got -101.0"),
    ("logit_bias", {1: NAN}, "logit_bias of token 1 must be finite, got nan"),
    ("logit_bias", {1: "a"}, "logit_bias of token 1 must be a number, got 'a'"),
    ("logit_bias", {"a": 1}, "a token id in logit_bias must be an integer, got 'a'"),
    ("logit_bias", {True: 1}, "a token id in logit_bias must be an integer, got True"),
    ("logit_bias", {-1: 1}, "a token id in logit_bias must be at least 0, got -1"),
    ("logit_bias", dict.fromkeys(range(1025), 1), "logit_bias must have at most 1024 entries, got 1025"),
    ("seed", 1.5, "seed must be an integer, got 1.5"),
    ("seed", 2**63, "seed must be at most 9223372036854775807, got 9223372036854775808"),
    ("seed", -(2**63), "seed must be at least -9223372036854775807, got -9223372036854775808"),
    ("stop", 5, "stop must be a string or a list of strings, got 5"),
    ("stop", b"x", "stop must be a string or a list of strings, got b'x'"),
    ("stop", ["a", 5], "stop must hold strings, got 5"),
    ("stop", "", "stop must hold strings of at least 1 character, got ''"),
    ("stop", ["a", ""], "stop must hold strings of at least 1 character, got ''"),
    ("stop", ["a"] * 17, "stop must have at most 16 entries, got 17"),
    ("stop", "a" * 1025, "stop must hold strings of at most 1024 characters, got one of 1025"),
    ("stop_token_ids", 5, "stop_token_ids must be a list of integers, got 5"),
    ("stop_token_ids", "5", "stop_token_ids must be a list of integers, got '5'"),
    ("stop_token_ids", [1, "5"], "a token id in stop_token_ids must be an integer, got '5'"),
    ("stop_token_ids", [True], "a token id in stop_token_ids must be an integer, got True"),
    ("stop_token_ids", [-1], "a token id in stop_token_ids must be at least 0, got -1"),
    ("stop_token_ids", range(1025), "stop_token_ids must have at most 1024 entries, got 1025"),
    ("include_stop_str_in_output", 1, "include_stop_str_in_output must be true or false, got 1"),
    ("forced_tokens", 5, "forced_tokens must be a list of integers, got 5"),
    ("forced_tokens", "5", "forced_tokens must be a list of integers, got '5'"),
    ("forced_tokens", None, "forced_tokens must be a list of integers, got None"),
    ("forced_tokens", [-1], "a token id in forced_tokens must be at least 0, got -1"),
    ("forced_tokens", [1, "5"], "a token id in forced_tokens must be an integer, got '5'"),
    ("forced_tokens", [[1], [2]], "forced_tokens must be one list, or one for each of the n = 1 samples"),
    ("forced_tokens", [[1, [2]]], "a token id in forced_tokens must be an integer, got [2]"),
    ("forced_tokens", [[True]], "a token id in forced_tokens must be an integer, got True"),
    ("forced_tokens", [1] * 17, "forced_tokens must be at most max_tokens (16), got 17"),
    ("ignore_eos", "yes", "ignore_eos must be true or false, got 'yes'"),
    ("min_tokens", -1, "min_tokens must be at least 0, got -1"),
    ("min_tokens", 17, "min_tokens must be at most max_tokens (16), got 17"),
    ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
    ("max_tokens", "many", "max_tokens must be an integer, got 'many'"),
    ("logprobs", -1, "logprobs must be at least 0, got -1"),
    ("logprobs", 65, "logprobs must be at most 64, got 65"),
    ("logprobs", True, "logprobs must be an integer, got True"),
    ("prompt_logprobs", -1, "prompt_logprobs must be at least 0, got -1"),
    ("prompt_logprobs", 65, "prompt_logprobs must be at most 64, got 65"),
    ("skip_special_tokens", None, "skip_special_tokens must be true or false, got None"),
    ("detokenize", 0, "detokenize must be true or false, got 0"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD, ids=lambda each: str(each)[:24])
def test_bad_value_names_field_value_and_limit(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        SamplingParams(**{name: value})


def test_values_too_large_to_print_are_still_refused_politely() -> None:
    with pytest.raises(InvalidRequestError, match="n must be at most 128, got an enormous int"):
        SamplingParams(n=10**5000)
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(temperature="x" * 10**6)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 100


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize must be true where stop is given, got False"):
        SamplingParams(stop="a", detokenize=False)


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    assert penalties == (1.0, 0.0, 0.0)
    assert (params.logit_bias, params.seed, params.stop, params.stop_token_ids) == (None, None, (), ())
    assert (params.min_tokens, params.max_tokens, params.logprobs, params.prompt_logprobs) == (
        0,
        16,
        None,
        None,
    )
    assert params.forced_tokens == ()
    assert params.skip_special_tokens and params.detokenize
    assert not params.ignore_eos and not params.include_stop_str_in_output


def test_limits_themselves_are_allowed() -> None:
    SamplingParams(n=128, temperature=0, top_p=1, top_k=-1, min_p=1, repetition_penalty=100, logprobs=64)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, logit_bias={0: 100, 1: -100}, prompt_logprobs=0)
    SamplingParams(stop=["a" * 1024] * 16, max_tokens=None, min_tokens=10**6, seed=2**63 - 1)


def test_values_are_stored_in_one_form() -> None:
    params = SamplingParams(temperature=2, stop="end", stop_token_ids=[3, 4], logit_bias={5: 1}, seed=-1)
    assert params.stop == ("end",) and params.stop_token_ids == (3, 4)
    assert type(params.temperature) is float and params.logit_bias == {5: 1.0}
    assert params.seed is None
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]
    assert type(SamplingParams(n=np.int64(2)).n) is int  # type: ignore[arg-type]
    assert SamplingParams(temperature=np.float32(0.5)).temperature == 0.5  # type: ignore[arg-type]


def test_forced_tokens_are_one_list_for_all_samples_or_one_each() -> None:
    params = SamplingParams(n=3, forced_tokens=[4, 5])
    assert [params.forced_for(sample) for sample in range(3)] == [(4, 5)] * 3 and params.num_forced == 2
    params = SamplingParams(n=3, forced_tokens=[[], [4], (5, np.int64(6))])  # type: ignore[list-item]
    assert [params.forced_for(sample) for sample in range(3)] == [(), (4,), (5, 6)] and params.num_forced == 2
    assert SamplingParams(forced_tokens=[[7]]) == SamplingParams(forced_tokens=(7,))
    assert SamplingParams(n=2, forced_tokens=[]).forced_for(1) == ()
    assert SamplingParams.from_mapping({"n": 2, "forced_tokens": [[1], [2]]}).forced_for(1) == (2,)
    with pytest.raises(InvalidRequestError, match="one for each of the n = 3 samples"):
        SamplingParams(n=3, forced_tokens=[[1], [2]])
    SamplingParams(forced_tokens=[1] * 17, max_tokens=None)


def test_params_are_checked_when_assigned_copied_and_hashable() -> None:
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[5] = 99.0
    assert params.logit_bias == {5: 1.0}
    unchanged = copy.copy(params)
    for name, value in {"n": 0, "min_tokens": 17, "max_token": 5, "compression": [2, 4]}.items():
        with pytest.raises(InvalidRequestError, match=name):
            setattr(params, name, value)
    assert params == unchanged
    params.stop, params.seed = "a", -1  # type: ignore[misc]
    assert params == SamplingParams(stop=["a"], logit_bias={5: 1.0}) != unchanged
    assert hash(params) == hash(SamplingParams(stop="a"))
    params.stop = ()  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params  # noqa: S301
    assert hash(params) == hash(SamplingParams(logit_bias={5: 1.0}))


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1, False)])
def test_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_from_mapping_reads_json() -> None:
    given = {
        "max_completion_tokens": 5,
        "temperature": 1,
        "logit_bias": {"7": -1},
        "stop": None,
        "top_k": None,
    }
    params = SamplingParams.from_mapping(given)
    assert params == SamplingParams(max_tokens=5, temperature=1.0, logit_bias={7: -1.0})
    assert SamplingParams.from_mapping({}) == SamplingParams()
    assert SamplingParams.from_mapping({"max_tokens": None}).max_tokens is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"temprature": 1},
            "unknown sampling parameter 'temprature'; did you mean temperature? Known: answer_prefix, bad_words",
        ),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens and max_tokens mean the same"),
        ({"logit_bias": {"x": 1}}, "a token id in logit_bias must be an integer, got 'x'"),
        ({"logit_bias": {"-1": 1}}, "a token id in logit_bias must be an integer, got '-1'"),
        ({"logit_bias": 3}, "logit_bias must map token ids to numbers, got 3"),
        ({"max_tokens": 1.0}, "max_tokens must be an integer, got 1.0"),
        ({"logprobs": True}, "logprobs must be an integer, got True"),
    ],
)
def test_from_mapping_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        SamplingParams.from_mapping(given)


def test_validate_for_checks_ids_against_the_vocabulary() -> None:
    SamplingParams(logit_bias={9: 1}, stop_token_ids=[9]).validate_for(10)
    SamplingParams().validate_for(1)
    limit = "must hold token ids below 9, the vocabulary's size, got 9"
    with pytest.raises(InvalidRequestError, match=f"logit_bias {limit}"):
        SamplingParams(logit_bias={3: 1, 9: 1}).validate_for(9)
    with pytest.raises(InvalidRequestError, match=f"stop_token_ids {limit}"):
        SamplingParams(stop_token_ids=[9, 2]).validate_for(9)
    with pytest.raises(InvalidRequestError, match=f"forced_tokens {limit}"):
        SamplingParams(n=2, forced_tokens=[[2], [9]]).validate_for(9)
