"""Questions without a text that answers them (NQ-open, arXiv:1906.00300)."""

import random
from pathlib import Path

from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.draws import chosen, worked_examples
from winnow_lab.evaluate.tasks.files import find_file, read_json_lines
from winnow_lab.evaluate.tasks.task import TaskSettings
from winnow_lab.tasks import DATA

_FILE = "NQ-open.dev.jsonl"
_SHOTS_FILE = "NQ-open.efficientqa.dev.1.1.jsonl"
_SHOTS = 5
_ANSWER_TOKENS = 32


class NqOpenTask:
    """Questions that people asked a search engine, answered from memory, behind worked examples.

    Prompt, stop strings and metric are those of TriviaQA in lm-evaluation-harness, with 5 examples. The questions are
    the 3,610 of the development set, of which 500 lie in `data`; examples come from the development set of the
    EfficientQA competition, which shares no question with it. The examples are the context.
    """

    summary = "NQ-open, questions answered from memory behind 5 examples"
    categories = ("nq-open",)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        directory = settings.data or DATA / "nq_open"
        rows = read_questions(_find(directory, _FILE))
        shots = _SHOTS if settings.shots is None else settings.shots
        examples = read_questions(_find(directory, _SHOTS_FILE)) if shots else []
        picked = chosen(random.Random(settings.seed), list(enumerate(rows, start=1)), settings.samples)
        return [
            Sample(
                name=f"nq-open/{number}",
                category="nq-open",
                context="".join(
                    f"{_prompt(asked)} {answers[0]}\n\n"
                    for asked, answers in worked_examples(
                        random.Random(f"{settings.seed}/{number}"), examples, shots
                    )
                ),
                questions=(_question(question, references),),
            )
            for number, (question, references) in picked
        ]


NQ_OPEN = NqOpenTask()


def read_questions(path: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Return questions and accepted answers from lines of `{"question", "answer": [...]}`."""
    return [(row.text("question"), row.texts("answer")) for row in read_json_lines(path)]


def _find(directory: Path, name: str) -> Path:
    return find_file(directory, name, "by the project Natural Questions (directory nq_open)")


def _question(question: str, references: tuple[str, ...]) -> Question:
    return Question(
        text=_prompt(question),
        references=references,
        metric="triviaqa",
        max_tokens=_ANSWER_TOKENS,
        stop=("\n", ".", ","),
    )


def _prompt(question: str) -> str:
    return f"Question: {question}?\nAnswer:"
