"""BIG-Bench Hard: 27 tasks that ask for several steps of reasoning (arXiv:2210.09261)."""

import random
from collections.abc import Iterator
from pathlib import Path

from winnow.errors import DatasetError
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.draws import chosen
from winnow_lab.evaluate.tasks.files import Record, find_file, read_json, read_text
from winnow_lab.evaluate.tasks.task import TaskSettings
from winnow_lab.tasks import DATA
from winnow_lab.tasks.shots import grouped, require_room, shots_asked

_TASKS = """boolean_expressions causal_judgement date_understanding disambiguation_qa dyck_languages formal_fallacies
    geometric_shapes hyperbaton logical_deduction_five_objects logical_deduction_seven_objects
    logical_deduction_three_objects movie_recommendation multistep_arithmetic_two navigate object_counting
    penguins_in_a_table reasoning_about_colored_objects ruin_names salient_translation_error_detection snarks
    sports_understanding temporal_sequences tracking_shuffled_objects_five_objects
    tracking_shuffled_objects_seven_objects tracking_shuffled_objects_three_objects web_of_lies word_sorting"""
_SHOTS = 3
_ANSWER_TOKENS = 1024
_PUBLISHED = "in suzgunmirac/BIG-Bench-Hard"
_SHOT = "\n\nQ: "
_REASON = "\nA: Let's think step by step.\n"


class BbhTask:
    """BIG-Bench Hard as lm-evaluation-harness asks it (bbh_cot_fewshot): three examples with reasoning, one question.

    Reads a directory with `bbh/<task>.json` and `cot-prompts/<task>.txt`, as published. The examples are the same for
    all questions of a task.
    """

    summary = "BIG-Bench Hard: reasoning in 27 tasks, with worked examples"
    categories = tuple(_TASKS.split())

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """See `Task`. `settings.samples` counts contexts, with `settings.questions` questions each."""
        return [
            require_room(sample, settings)
            for category in settings.categories or self.categories
            for sample in self._category(category, settings)
        ]

    def _category(self, category: str, settings: TaskSettings) -> Iterator[Sample]:
        data = DATA / "bbh" if settings.data is None else settings.data
        examples = read_json(find_file(data, f"bbh/{category}.json", _PUBLISHED)).records("examples")
        context = _context(find_file(data, f"cot-prompts/{category}.txt", _PUBLISHED), settings)
        wanted = None if settings.samples is None else settings.samples * settings.questions
        numbered = list(enumerate(examples, start=1))
        asked = chosen(random.Random(f"{settings.seed}/{category}"), numbered, wanted)
        for rows in grouped(asked, settings.questions):
            yield Sample(
                name=f"{category}/{rows[0][0]}",
                category=category,
                context=context,
                questions=tuple(_question(row) for _, row in rows),
            )


def _context(path: Path, settings: TaskSettings) -> str:
    """Return the description and worked examples of a prompt file, whose first two lines are a canary and a rule."""
    _, ruled, prompt = read_text(path).partition("\n-----\n")
    description, *shots = prompt.strip().split(_SHOT)
    if not ruled or not shots:
        raise DatasetError(f"{path} has no line '-----' with a description and examples after it")
    return _SHOT.join([description, *shots[: shots_asked(settings, _SHOTS, len(shots))]])


def _question(row: Record) -> Question:
    return Question(
        text=f"{_SHOT}{row.text('input')}{_REASON}",
        references=(row.text("target"),),
        metric="bbh",
        max_tokens=_ANSWER_TOKENS,
        stop=("</s>", "Q", "\n\n"),
    )


BBH = BbhTask()
