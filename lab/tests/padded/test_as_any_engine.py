"""Tests of what holds for any engine, with the padded one, and what it alone refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_end_tokens import (  # noqa: F401
    fine_tune,
    test_a_special_tokens_text_is_a_stop_string,
    test_the_tokenizers_end_token_ends_an_answer,
)
from test_llm_tenants import open_llm, test_scheduling_policies  # noqa: F401
from test_loop import TestInterruptions, TestRequests, engine  # noqa: F401
from test_not_finite import (  # noqa: F401
    faulty,
    open_llm as open_faulty,
    test_a_forced_token_spoils_an_answer_that_has_begun,
    test_a_request_fails_alone,
    test_every_token_ruled_out_by_the_request,
    test_prompt_logprobs_that_are_no_numbers_fail_the_request,
)
from test_positions import test_logprobs_equal_those_without_a_cache  # noqa: F401
from test_request_faults import (  # noqa: F401
    test_a_detokenizer_that_raises,
    test_an_answer_that_cannot_begin_leaves_nothing_behind,
    test_half_a_surrogate_pair,
    test_prompt_logprobs_whose_texts_raise,
)

from winnow import LLM, SamplingParams
from winnow.errors import ConfigError, InvalidRequestError


@pytest.fixture(scope="session")
def engine_name() -> str:
    return "padded:prefill_group=1"


@pytest.fixture(scope="module", params=["embedding", "shaping"])
def llm(faulty: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:  # noqa: F811
    with open_faulty(faulty, engine=f"padded:mode={request.param}") as llm:
        yield llm
        llm.check_integrity()
        assert not llm.has_unfinished


def test_what_needs_kvs_that_stay_is_refused(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=2)
    parent = llm.submit([5, 6], params)
    with pytest.raises(InvalidRequestError, match="cannot be forked: that needs engine=paged"):
        llm.fork(parent)
    llm.abort(parent)
    assert llm.sessions() == llm.take_prefix_events() == [] and not llm.drop_session("one")
    assert llm.reset_prefix_cache()


def test_quotas_are_refused() -> None:
    with pytest.raises(ConfigError, match="guarantee and limit need engine=paged, got those of a"):
        LLM(engine="padded", tenants={"a": {"limit": 0.5}, "b": {"weight": 2}})
