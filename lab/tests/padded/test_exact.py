"""Whatever joins, leaves, is parked or cut off: a query's tokens are those of transformers' `generate` on it alone."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st
from padded_models import MAX_TOKENS, MODELS, PROMPTS, Case, case

from winnow.engine.requests.new_request import NewRequest
from winnow.sampling import SamplingParams
from winnow_lab.padded.options import PADDED_MODES


@dataclass(frozen=True)
class Query:
    prompt: int
    max_tokens: int
    arrives: int
    """After so many steps."""
    priority: int
    aborted_after: int | None


QUERIES = st.builds(
    Query,
    prompt=st.integers(0, len(PROMPTS) - 1),
    max_tokens=st.integers(1, MAX_TOKENS),
    arrives=st.integers(0, 20),
    priority=st.integers(0, 2),
    aborted_after=st.none() | st.none() | st.none() | st.integers(1, 20),
)


@pytest.fixture(scope="module")
def each_case(request: pytest.FixtureRequest) -> Case:
    return case(request.param)


# The first model in every mode, each other one where queries join and leave, and one of each way of telling positions
# in another mode: windows, learned, ALiBi by the mask and by columns, chunks.
MODES = [*PADDED_MODES, "embedding, in the background"]
PAIRS = [(name, mode) for name in MODELS for mode in (MODES if name == "llama-gqa" else ["embedding"])]
PAIRS += [("gemma2", "embedding, in the background"), ("gpt2", "pd"), ("bloom", "shaping")]
PAIRS += [("mpt", "pd"), ("llama4-chunks", "static")]


@pytest.mark.parametrize(("each_case", "mode"), PAIRS, indirect=["each_case"])
@settings(max_examples=2)
@given(
    queries=st.lists(QUERIES, min_size=5, max_size=9),
    max_num_seqs=st.integers(1, 6),
    columns=st.sampled_from([90, 200, 10_000]),
    park_columns=st.sampled_from([0, 30, 150, 10_000]),
    chunk=st.sampled_from([7, None]),
)
def test_tokens_equal_generate_alone(
    each_case: Case,
    mode: str,
    queries: list[Query],
    max_num_seqs: int,
    columns: int,
    park_columns: int,
    chunk: int | None,
) -> None:
    """`columns` and `park_columns` are KV and host memory in columns of one row: one long query, a few, or all; and
    nothing at all."""
    mode, *background = mode.split(", ")
    column_bytes = each_case.open(mode)._executor._budget.column_bytes
    engine = each_case.open(
        mode,
        overlap_prefill=bool(background),
        max_num_seqs=max_num_seqs,
        kv_memory=columns * column_bytes,
        park_memory=park_columns * column_bytes or 1,
        prefill_chunk=chunk,
        group_padding=0.3,
    )
    pending = sorted(enumerate(queries), key=lambda item: item[1].arrives)
    answers: dict[str, list[int]] = {}
    steps = 0
    while pending or engine.has_unfinished:
        while pending and pending[0][1].arrives <= steps:
            index, query = pending.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=query.max_tokens, ignore_eos=True)
            engine.add(NewRequest(str(index), None, PROMPTS[query.prompt], params, priority=query.priority))
        for output in engine.step():
            answers[output.request_id] = output.outputs[0].token_ids
        steps += 1
        for index, query in enumerate(queries):
            if query.aborted_after is not None and steps == query.arrives + query.aborted_after:
                engine.abort(str(index))
        engine.check_integrity()
    for index, query in enumerate(queries):
        expected = each_case.answers[query.prompt][: query.max_tokens]
        found = answers.get(str(index), [])
        assert found == expected[: len(found)]
        assert len(found) == query.max_tokens or query.aborted_after is not None
    assert engine.stats().kv_bytes_used == 0, "memory is given back when all are finished"
