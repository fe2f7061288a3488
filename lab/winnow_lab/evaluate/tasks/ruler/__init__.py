"""RULER (arXiv:2404.06654): what is the context size that a model can really use?"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from winnow.errors import DatasetError, EvaluationError
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks.files import has_file
from winnow_lab.evaluate.tasks.ruler.documents import (
    HOTPOT,
    SQUAD,
    DocumentQA,
    Draw,
    Materials,
    Prompt,
    Recipe,
)
from winnow_lab.evaluate.tasks.ruler.lists import CommonWords, FrequentWords, Tracking
from winnow_lab.evaluate.tasks.ruler.needles import Niah
from winnow_lab.evaluate.tasks.task import TaskSettings, check_lengths, largest_fitting

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "niah_single_1": Niah("noise"),
        "niah_single_2": Niah("essay"),
        "niah_single_3": Niah("essay", value_kind="uuids"),
        "niah_multikey_1": Niah("essay", keys=4),
        "niah_multikey_2": Niah("needles"),
        "niah_multikey_3": Niah("needles", key_kind="uuids", value_kind="uuids"),
        "niah_multivalue": Niah("essay", values=4),
        "niah_multiquery": Niah("essay", keys=4, asked=4),
        "vt": Tracking(),
        "cwe": CommonWords(),
        "fwe": FrequentWords(),
        "qa_1": DocumentQA("squad"),
        "qa_2": DocumentQA("hotpotqa"),
    }
)
"""The 13 tasks by name (table 2 of the paper and `synthetic.yaml` of its code)."""
# Of each recipe, as published.
_SAMPLES = 500


class RulerTask:
    """The 13 recipes of RULER at every length asked for, made anew with its templates and numbers.

    What differs from the published samples: prose comes from another book, from a place drawn for each sample, and keys
    and words from other lists. qa_1 and qa_2 take their documents from the files of SQuAD and HotpotQA in the data
    directory. Without one, qa_1 asks about passages of Natural Questions, and its row says so. Where all categories are
    asked for, those whose file is missing are left out; named, they raise. Prompts are plain text, without a chat
    template.
    """

    summary = "RULER's 13 recipes at any length: needles, variables, words, documents"
    categories = tuple(RECIPES)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        check_lengths(settings)
        materials = Materials(settings.data)
        return [
            _sample(settings, materials, category, tokens, number)
            for tokens in settings.tokens
            for category in settings.categories or _present(settings.data)
            for number in range(_SAMPLES if settings.samples is None else settings.samples)
        ]


RULER = RulerTask()


def _present(data: Path | None) -> tuple[str, ...]:
    absent = set()
    if data is None or not has_file(data, HOTPOT):
        absent.add("qa_2")
    if data is not None and not any(has_file(data, name) for name in SQUAD):
        absent.add("qa_1")
    if len(absent) == 2:
        raise DatasetError(
            f"--data: {data} has neither {' nor '.join(SQUAD)} of the project SQuAD, nor {HOTPOT} of the project "
            "HotpotQA; without --data every other category is there"
        )
    return tuple(category for category in RECIPES if category not in absent)


def _sample(settings: TaskSettings, materials: Materials, category: str, tokens: int, number: int) -> Sample:
    """The sample of the largest size that fits, with as many of the questions as fit."""
    for questions in range(settings.questions, 0, -1):
        draw = Draw(settings.seed, category, tokens, number, questions, materials, settings.count_tokens)
        prompt = _fitted(draw)
        if prompt is not None:
            # Not RULER's row where other documents stand in for RULER's.
            stands_in = category == "qa_1" and settings.data is None
            return Sample(
                name=f"{category}/{tokens}/{number}",
                category="qa_1 (NQ stand-in)" if stands_in else category,
                context=prompt.context,
                questions=prompt.questions,
                length=tokens,
            )
    raise EvaluationError(f"--tokens {tokens}: too few for the smallest sample of {category}")


def _fitted(draw: Draw) -> Prompt | None:
    recipe = RECIPES[draw.recipe]

    def cost(size: int) -> int:
        """Tokens of the longest prompt with its answer."""
        prompt = recipe.prompt(draw, size)
        texts = ((prompt.context + each.plain, each.max_tokens) for each in prompt.questions)
        return max(draw.count_tokens(text) + answer for text, answer in texts)

    size = largest_fitting(cost, draw.tokens)
    return None if size is None else recipe.prompt(draw, size)
