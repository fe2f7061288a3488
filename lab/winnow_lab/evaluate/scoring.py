"""Scoring: from an output of the engine to a scored outcome.

Floors, rounding and short answers keep the compression that a context achieves from the one asked for.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from winnow.eviction import SequenceEviction, resolve_policy
from winnow.metrics import score
from winnow.outputs import CompletionOutput, EvictionReport
from winnow.values.eviction_request import EvictionRequest
from winnow_lab.evaluate.cell import Cell
from winnow_lab.evaluate.outcome import Outcome
from winnow_lab.evaluate.requests import EvalRequest, SubAnswer

if TYPE_CHECKING:
    from winnow.llm import LLM


def outcome_of(llm: "LLM", request: EvalRequest, answer: SubAnswer, output: CompletionOutput) -> Outcome:
    """Return the outcome of one answer of a request."""
    question = request.sample.questions[answer.question]
    token_ids = output.token_ids[answer.forced :][: question.max_tokens]
    text = output.text
    if answer.forced:
        assert llm.tokenizer is not None, "PromptMaker asked for one"
        # The engine's text begins with the question, and may run on while another question's answer is longer.
        text = until_stop(llm.tokenizer.decode(token_ids, skip_special_tokens=True), question.stop)
    report = output.eviction
    held = len(request.token_ids) + len(output.token_ids) - 1
    return Outcome(
        cell=answer.cell.name,
        sample=request.sample.name,
        question=answer.question,
        category=request.sample.category,
        length=request.sample.length,
        score=score(question.metric, text, question.references, question.classes),
        answer=text,
        prompt_tokens=len(request.token_ids) + answer.forced,
        answer_tokens=len(token_ids),
        achieved_compression=1.0 if report is None else _achieved(llm, request, answer.cell, report),
        kv_bytes=llm.kv_bytes(held) if report is None else report.bytes_held,
    )


def _achieved(llm: "LLM", request: EvalRequest, cell: Cell, report: EvictionReport) -> float | None:
    policy = cell.policy
    config = llm.config.eviction.for_policy(policy, pools=policy.pool is not None, amount=cell.asked)
    eviction = resolve_policy(config).for_prompt(
        len(request.token_ids),
        request.last_token,
        EvictionRequest(context_tokens=request.context_tokens),
        may_idle=False,
    )
    return achieved_compression(report, eviction)


def until_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def achieved_compression(report: EvictionReport, eviction: SequenceEviction | None) -> float | None:
    """Return tokens of the context per KV that was kept of them; None if the answer ended before they were cut.

    Once a round after the context's end has mixed them with the question's and the answer's, tokens of all per KV at
    the answer's end.

    Args:
        eviction: the policy with the numbers of the prompt; None where it never takes anything.
    """
    if eviction is None:
        return 1.0
    expected = _rounds_in_context(eviction)
    if report.rounds < expected:
        return None
    if report.rounds > expected:
        return report.compression
    after = report.num_tokens - eviction.context_len
    return eviction.context_len / (report.mean_kept - after)


def _rounds_in_context(eviction: SequenceEviction) -> int:
    """Return rounds until the context is computed and cut."""
    computed = last_round = rounds = 0
    kvs = 0.0
    while computed < eviction.context_len:
        ahead = eviction.tokens_to_round(computed, last_round, kvs) or eviction.context_len
        computed, kvs = computed + ahead, kvs + ahead
        if eviction.round_due(computed, last_round, kvs):
            rounds, last_round, kvs = rounds + 1, computed, float(eviction.target)
    return rounds
