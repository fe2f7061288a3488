"""RULER as a task: its recipes at every length asked for."""

from pathlib import Path

from winnow.errors import DatasetError, EvaluationError
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks.fit import check_lengths, largest_fitting
from winnow_lab.evaluate.tasks.ruler import hotpot, squad
from winnow_lab.evaluate.tasks.ruler.materials import Materials
from winnow_lab.evaluate.tasks.ruler.recipe import Draw, Prompt
from winnow_lab.evaluate.tasks.ruler.recipes import RECIPES
from winnow_lab.evaluate.tasks.task import TaskSettings

# Of each recipe, as published.
_SAMPLES = 500


class RulerTask:
    """The 13 recipes of RULER (arXiv:2404.06654), made anew with its templates and numbers.

    What differs from the published samples: prose comes from another book, from a place drawn for each sample, and keys
    and words from other lists. qa_1 and qa_2 take their documents from the files of SQuAD and HotpotQA in the data
    directory. Without one, qa_1 asks about passages of Natural Questions, and its row says so. Where all categories are
    asked for, those whose file is missing are left out; named, they raise. Prompts are plain text, without a chat
    template.
    """

    summary = "RULER's 13 recipes at any length: needles, variables, words, documents"
    categories = tuple(RECIPES)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """See `Task`."""
        check_lengths(settings)
        materials = Materials(settings.data)
        count = _SAMPLES if settings.samples is None else settings.samples
        return [
            _sample(settings, materials, category, tokens, number)
            for tokens in settings.tokens
            for category in _chosen(settings)
            for number in range(count)
        ]


RULER = RulerTask()


def _chosen(settings: TaskSettings) -> tuple[str, ...]:
    if settings.categories:
        return settings.categories
    absent = set()
    if settings.data is None or not hotpot.has_hotpot(settings.data):
        absent.add("qa_2")
    if settings.data is not None and not squad.has_squad(settings.data):
        absent.add("qa_1")
    if len(absent) == 2:
        raise DatasetError(
            f"--data: {settings.data} has neither {squad.FILES[0]} nor {squad.FILES[1]} of the project SQuAD, nor "
            f"{hotpot.FILE} of the project HotpotQA; without --data every other category is there"
        )
    return tuple(category for category in RECIPES if category not in absent)


def _sample(settings: TaskSettings, materials: Materials, category: str, tokens: int, number: int) -> Sample:
    """Return a sample of the largest size that fits, with as many of the questions as fit.

    Raises:
        EvaluationError: not even the smallest one fits.
    """
    for questions in range(settings.questions, 0, -1):
        draw = Draw(settings.seed, category, tokens, number, questions, materials, settings.count_tokens)
        prompt = _fitted(draw)
        if prompt is not None:
            return Sample(
                name=f"{category}/{tokens}/{number}",
                category=_row(category, settings.data),
                context=prompt.context,
                questions=prompt.questions,
                length=tokens,
            )
    raise EvaluationError(f"--tokens {tokens}: too few for the smallest sample of {category}")


def _fitted(draw: Draw) -> Prompt | None:
    recipe = RECIPES[draw.recipe]

    def cost(size: int) -> int:
        """Return tokens of the longest prompt with its answer."""
        prompt = recipe.prompt(draw, size)
        return max(
            draw.count_tokens(prompt.context + question.plain) + question.max_tokens
            for question in prompt.questions
        )

    size = largest_fitting(cost, draw.tokens)
    return None if size is None else recipe.prompt(draw, size)


def _row(category: str, data: Path | None) -> str:
    """Return the category as its row names it: not as RULER's where other documents stand in for RULER's."""
    return "qa_1 (NQ stand-in)" if category == "qa_1" and data is None else category
