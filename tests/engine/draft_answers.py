"""Answers of an engine with drafts, its invariants checked after each step."""

from typing import Any

from winnow import LLM, SamplingParams


def answers(llm: LLM, params: SamplingParams, prompts: list[list[int]]) -> list[Any]:
    """Tokens and reasons, with the engine's invariants checked after each step."""
    for number, prompt in enumerate(prompts):
        llm.submit(prompt, params, request_id=str(number))
    finished = {}
    while llm.has_unfinished:
        finished |= {output.request_id: output for output in llm.step() if output.finished}
        llm.check_integrity()
    return [
        [(each.token_ids, each.finish_reason) for each in finished[name].outputs]
        for name in sorted(finished, key=int)
    ]
