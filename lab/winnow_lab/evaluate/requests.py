"""Requests of an evaluation, and their outcomes; cells and questions share one where a context is computed once.

Floors, rounding and short answers keep the compression that a context achieves from the one asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from winnow.errors import EvaluationError
from winnow.eviction import SequenceEviction, resolve_policy
from winnow.llm import LLM
from winnow.outputs import CompletionOutput, EvictionReport
from winnow.sampling import SamplingParams
from winnow.values.eviction_request import EvictionRequest
from winnow_lab.evaluate.cell import AGNOSTIC, Cell
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.prompt import Prompt
from winnow_lab.evaluate.result import Outcome
from winnow_lab.evaluate.sample import Question, Sample

Missing = Callable[[Cell, Sample, int], bool]
"""Predicate: a question, by its place in the sample, is still to be answered in a cell."""


@dataclass(frozen=True)
class SubAnswer:
    """One answer of a request: a question, by its place, in a cell; its first `forced` tokens are the question's."""

    cell: Cell
    question: int
    forced: int = 0


@dataclass(frozen=True)
class EvalRequest:
    """One request to the engine; `sub_answers` has one entry per answer."""

    sample: Sample
    token_ids: tuple[int, ...]
    params: SamplingParams
    sub_answers: tuple[SubAnswer, ...]

    @property
    def context_tokens(self) -> int:
        """Tokens of the prompt that the policy judges."""
        return self.params.context_tokens or len(self.token_ids)

    @property
    def last_token(self) -> int:
        """Most tokens that are computed for an answer; the last one of it never is."""
        assert self.params.max_tokens is not None
        return len(self.token_ids) + self.params.max_tokens - 1


def shared_cells(cells: Sequence[Cell]) -> list[tuple[Cell, ...]]:
    """Cells in groups whose requests may be one: presets that compute the prompt alike at all amounts of a kind.

    Where rounds fall within the prompt it is not computed alike.
    """
    groups: list[tuple[Cell, ...]] = []
    for _, same in groupby(cells, key=lambda cell: (cell.query, cell.preset, cell.amount.kv_budget is None)):
        members = tuple(same)
        groups += [(cell,) for cell in members] if members[0].policy.when.in_prefill else [members]
    return groups


def make_requests(
    cells: Sequence[Cell], sample: Sample, prompts: Sequence[Prompt], missing: Missing
) -> Iterator[EvalRequest]:
    """The requests for a sample in a group of `shared_cells`; `prompts` has one entry per question.

    One question: one request, its answers being the cells. Several questions on a context that is judged without them:
    one request per cell, its answers being the questions, so that the context is computed and compressed once. Several
    questions, each judged with the context: one request per question.
    """
    if len(prompts) > 1 and _shares_context(cells[0], prompts):
        for cell in cells:
            left = [place for place in range(len(prompts)) if missing(cell, sample, place)]
            # One request has one set of stop strings.
            for _, same in groupby(left, key=lambda place: sample.questions[place].stop):
                yield _request_questions(cell, sample, prompts, list(same))
        return
    for place, prompt in enumerate(prompts):
        wanted = [cell for cell in cells if missing(cell, sample, place)]
        if wanted:
            yield _request_cells(wanted, sample, place, prompt)


def _shares_context(cell: Cell, prompts: Sequence[Prompt]) -> bool:
    """Whether a context may be computed once for several questions. The full cache does not depend on them."""
    return cell.query == AGNOSTIC or (cell.is_full and all(prompt.context_tokens for prompt in prompts))


def _request_cells(cells: Sequence[Cell], sample: Sample, place: int, prompt: Prompt) -> EvalRequest:
    question = sample.questions[place]
    params = _params(
        cells,
        question,
        max_tokens=question.max_tokens,
        context_tokens=_context(sample, prompt.context_tokens) if cells[0].query == AGNOSTIC else None,
        template_tail=prompt.template_tail,
        answer_prefix=prompt.answer_prefix,
    )
    return EvalRequest(sample, prompt.token_ids, params, tuple(SubAnswer(cell, place) for cell in cells))


def _request_questions(
    cell: Cell, sample: Sample, prompts: Sequence[Prompt], places: Sequence[int]
) -> EvalRequest:
    context = _context(sample, min(prompts[place].context_tokens for place in places))
    forced = {place: prompts[place].token_ids[context:] for place in places}
    lengths = (len(tokens) + sample.questions[place].max_tokens for place, tokens in forced.items())
    params = _params(
        [cell] * len(places),
        sample.questions[places[0]],
        max_tokens=max(lengths),
        forced_tokens=list(forced.values()),
    )
    answers = tuple(SubAnswer(cell, place, len(tokens)) for place, tokens in forced.items())
    return EvalRequest(sample, prompts[places[0]].token_ids[:context], params, answers)


def _params(cells: Sequence[Cell], question: Question, **more: Any) -> SamplingParams:
    return SamplingParams(
        n=len(cells),
        temperature=0.0,
        stop=question.stop,
        eviction=cells[0].policy,
        compression=_one_or_each([cell.asked.compression for cell in cells]),
        kv_budget=_one_or_each([cell.asked.kv_budget for cell in cells]),
        **more,
    )


def _one_or_each(values: list[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else values


def _context(sample: Sample, context_tokens: int) -> int:
    if context_tokens < 1:
        raise EvaluationError(
            f"sample {sample.name!r} has no context before its question, so nothing can be judged without it: "
            "ask with --query aware"
        )
    return context_tokens


def outcome_of(llm: LLM, request: EvalRequest, answer: SubAnswer, output: CompletionOutput) -> Outcome:
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


def _achieved(llm: LLM, request: EvalRequest, cell: Cell, report: EvictionReport) -> float | None:
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
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def achieved_compression(report: EvictionReport, eviction: SequenceEviction | None) -> float | None:
    """Tokens of the context per KV that was kept of them; None if the answer ended before they were cut.

    Once a round after the context's end has mixed them with the question's and the answer's, tokens of all per KV at
    the answer's end.
    """
    if eviction is None:
        return 1.0
    # Rounds until the context is computed and cut.
    computed = last_round = expected = 0
    kvs = 0.0
    while computed < eviction.context_len:
        ahead = eviction.tokens_to_round(computed, last_round, kvs) or eviction.context_len
        computed, kvs = computed + ahead, kvs + ahead
        if eviction.round_due(computed, last_round, kvs):
            expected, last_round, kvs = expected + 1, computed, float(eviction.target)
    if report.rounds < expected:
        return None
    if report.rounds > expected:
        return report.compression
    after = report.num_tokens - eviction.context_len
    return eviction.context_len / (report.mean_kept - after)
