"""From what the engine gave to a scored outcome."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from winnow.evaluate.asks import Ask, Part
from winnow.evaluate.cell import Cell
from winnow.evaluate.metrics import score
from winnow.evaluate.outcome import Outcome
from winnow.evaluate.reached import reached_compression
from winnow.eviction import resolve_policy
from winnow.outputs import CompletionOutput, EvictionReport

if TYPE_CHECKING:
    from winnow.llm import LLM


def outcome_of(llm: "LLM", ask: Ask, part: Part, output: CompletionOutput) -> Outcome:
    """The outcome of one answer of a request."""
    question = ask.sample.questions[part.question]
    token_ids = output.token_ids[part.forced :][: question.max_tokens]
    text = output.text
    if part.forced:
        assert llm.tokenizer is not None, "PromptMaker asked for one"
        # The engine's text begins with the question, and may run on while another question's answer is longer.
        text = until_stop(llm.tokenizer.decode(token_ids, skip_special_tokens=True), question.stop)
    report = output.eviction
    held = len(ask.token_ids) + len(output.token_ids) - 1
    return Outcome(
        cell=part.cell.name,
        sample=ask.sample.name,
        question=part.question,
        category=ask.sample.category,
        length=ask.sample.length,
        score=score(question.metric, text, question.references, question.classes),
        answer=text,
        prompt_tokens=len(ask.token_ids) + part.forced,
        answer_tokens=len(token_ids),
        reached=1.0 if report is None else _reached(llm, ask, part.cell, report),
        kv_bytes=llm.kv_bytes(held) if report is None else report.bytes_held,
    )


def _reached(llm: "LLM", ask: Ask, cell: Cell, report: EvictionReport) -> float | None:
    config = replace(llm.config.eviction, eviction=cell.policy, compression=cell.compression, kv_budget=None)
    eviction = resolve_policy(config).for_prompt(
        len(ask.token_ids), ask.last_token, ask.context_tokens, may_idle=False
    )
    return reached_compression(report, eviction)


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop strings."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
