"""Requests of an evaluation; cells and questions share one where a context can be computed once for them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from winnow.errors import EvaluationError
from winnow.sampling import SamplingParams
from winnow_lab.evaluate.cell import AGNOSTIC, Cell
from winnow_lab.evaluate.prompt import Prompt
from winnow_lab.evaluate.sample import Question, Sample

Missing = Callable[[Cell, Sample, int], bool]
"""Predicate: a question, by its place in the sample, is still to be answered in a cell."""


@dataclass(frozen=True)
class SubAnswer:
    """One answer of a request: a question in a cell.

    Attributes:
        question: its place among the sample's questions.
        forced: tokens at the answer's beginning that are the question's.
    """

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
    """Return cells in groups whose requests may be one: presets that compute the prompt alike at all amounts of a kind.

    Where rounds fall within the prompt it is not computed alike.
    """
    groups: list[tuple[Cell, ...]] = []
    for _, same in groupby(cells, key=lambda cell: (cell.query, cell.preset, cell.amount.kv_budget is None)):
        members = tuple(same)
        if members[0].policy.when.in_prefill:
            groups += [(cell,) for cell in members]
        else:
            groups.append(members)
    return groups


def make_requests(
    cells: Sequence[Cell], sample: Sample, prompts: Sequence[Prompt], missing: Missing
) -> Iterator[EvalRequest]:
    """Yield the requests for a sample in a group of `shared_cells`; `prompts` has one entry per question.

    One question: one request, its answers being the cells. Several questions on a context that is judged without them:
    one request per cell, its answers being the questions, so that the context is computed and compressed once. Several
    questions, each judged with the context: one request per question.

    Raises:
        EvaluationError: no context to judge without the question.
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
    """Return whether a context may be computed once for several questions. The full cache does not depend on them."""
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
    forced = [prompts[place].token_ids[context:] for place in places]
    params = _params(
        [cell] * len(places),
        sample.questions[places[0]],
        max_tokens=max(
            len(tokens) + sample.questions[place].max_tokens
            for place, tokens in zip(places, forced, strict=True)
        ),
        forced_tokens=forced,
    )
    answers = tuple(SubAnswer(cell, place, len(tokens)) for place, tokens in zip(places, forced, strict=True))
    return EvalRequest(sample, prompts[places[0]].token_ids[:context], params, answers)


def _params(
    cells: Sequence[Cell],
    question: Question,
    *,
    max_tokens: int,
    context_tokens: int | None = None,
    template_tail: int = 0,
    answer_prefix: int = 0,
    forced_tokens: Sequence[Sequence[int]] = (),
) -> SamplingParams:
    return SamplingParams(
        n=len(cells),
        temperature=0.0,
        max_tokens=max_tokens,
        stop=question.stop,
        eviction=cells[0].policy,
        compression=_one_or_each([cell.asked.compression for cell in cells]),
        kv_budget=_one_or_each([cell.asked.kv_budget for cell in cells]),
        context_tokens=context_tokens,
        template_tail=template_tail,
        answer_prefix=answer_prefix,
        forced_tokens=forced_tokens,
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
