"""Requests and their answers, without an engine."""

import math

from winnow.engine.requests.request import Request
from winnow.engine.requests.request_table import RequestTable
from winnow.outputs import RequestMetrics
from winnow.sampling import Logprob, SamplingParams


def test_a_fault_found_in_the_prompt_ends_each_answer_with_its_first_token() -> None:
    """Also where the prompt's last logits are sound, as behind a sliding window."""
    table = RequestTable(None, frozenset(), lambda: 0.0)
    params = SamplingParams(n=2, prompt_logprobs=0)
    request = Request("a", None, [5, 6, 7], params, 16, RequestMetrics(arrival_time=0.0))
    table.add(request)
    table.append_prompt_logprobs(request, [{6: Logprob(math.nan, 1)}, {7: Logprob(-1.0, 1)}])
    for sequence in request.sequences:
        reason = table.append_token(sequence, 9, None, 0.0)
        assert reason == ("error", None)
        sequence.finish_reason, sequence.stop_reason = reason
        table.end(sequence)
    output = table.output(request)
    assert output.error is not None and "not finite" in output.error and "bfloat16" in output.error
    assert [answer.token_ids for answer in output.outputs] == [[], []] and table.generated_tokens == 0
