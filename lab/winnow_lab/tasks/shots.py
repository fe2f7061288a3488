"""Tasks asked behind worked examples: mathematics in words (GSM8K, arXiv:2110.14168, as lm-evaluation-harness asks it),
summaries of texts (SciTLDR, arXiv:2004.15011, or CNN/DM and alike from files)."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from winnow.errors import EvaluationError
from winnow_lab.evaluate.metrics import require_metric
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.draws import chosen
from winnow_lab.evaluate.tasks.files import Record, find_file, has_file, read_json_lines
from winnow_lab.evaluate.tasks.task import TaskSettings
from winnow_lab.tasks import DATA

T = TypeVar("T")


def shots_asked(settings: TaskSettings, default: int, most: int) -> int:
    """How many worked examples to give; raises EvaluationError where fewer than 0 or more than there are."""
    shots = default if settings.shots is None else settings.shots
    if not 0 <= shots <= most:
        raise EvaluationError(
            f"--shots must lie between 0 and {most}, the examples that there are, got {shots}"
        )
    return shots


def grouped(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in groups of equal size; the last one may be smaller."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def require_room(sample: Sample, settings: TaskSettings) -> Sample:
    """The sample; raises EvaluationError where a prompt of it leaves the model no room for the whole answer."""
    for question in sample.questions:
        tokens = settings.count_tokens(sample.context + question.plain)
        if tokens + question.max_tokens > settings.max_model_len:
            raise EvaluationError(
                f"sample {sample.name} has {tokens} tokens and answers with up to {question.max_tokens}, but the model "
                f"takes {settings.max_model_len} together: fewer --shots make it shorter"
            )
    return sample


_TEST, _TRAIN = "test.jsonl", "train.jsonl"


@dataclass(frozen=True)
class ShotsTask:
    """Rows of test.jsonl, each asked behind worked examples that are drawn for it from train.jsonl.

    Where several questions share a context, they share its examples.

    Attributes:
        name: of its category, and of the directory of the sample in `data`.
        published: where the whole is, for `find_file`.
        metric: a key of `winnow_lab.evaluate.metrics.METRICS`.
        ask: a row -> what stands before its answer in the prompt.
        answers: a row -> the accepted answers; a worked example shows the first.
        shots: worked examples, where the settings name no number.
        train: whether there has to be a train.jsonl; where there is none, examples are other rows of test.jsonl.
    """

    summary: str
    name: str
    published: str
    metric: str
    ask: Callable[[Record], str]
    answers: Callable[[Record], tuple[str, ...]]
    shots: int
    answer_tokens: int
    stop: tuple[str, ...]
    train: bool = True

    @property
    def categories(self) -> tuple[str, ...]:
        return (self.name,)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """See `Task`. `settings.samples` counts contexts, with `settings.questions` questions each."""
        require_metric(self.metric)
        data = DATA / self.name if settings.data is None else settings.data
        test = list(enumerate(read_json_lines(find_file(data, _TEST, self.published)), start=1))
        train: list[Record] = []
        if self.train or has_file(data, _TRAIN):
            train = list(read_json_lines(find_file(data, _TRAIN, self.published)))
        shots = shots_asked(settings, self.shots, len(train or test[settings.questions :]))
        wanted = None if settings.samples is None else settings.samples * settings.questions
        asked = chosen(random.Random(f"{settings.seed}/{self.name}"), test, wanted)
        samples = []
        for rows in grouped(asked, settings.questions):
            others = train or [row for place, row in test if place not in dict(rows)]
            samples.append(require_room(self._sample(rows, others, shots, settings.seed), settings))
        return samples

    def _sample(
        self, rows: Sequence[tuple[int, Record]], train: Sequence[Record], shots: int, seed: int
    ) -> Sample:
        name = f"{self.name}/{rows[0][0]}"
        examples = random.Random(f"{seed}/{name}").sample(train, shots)
        return Sample(
            name=name,
            category=self.name,
            context="".join(f"{self.ask(row)} {self.answers(row)[0]}\n\n" for row in examples),
            questions=tuple(
                Question(
                    text=self.ask(row),
                    references=self.answers(row),
                    metric=self.metric,
                    max_tokens=self.answer_tokens,
                    stop=self.stop,
                )
                for _, row in rows
            ),
        )


GSM8K = ShotsTask(
    "mathematics in words; the number behind ####",
    name="gsm8k",
    published="in grade_school_math/data of openai/grade-school-math",
    metric="gsm8k-strict",
    ask=lambda row: f"Question: {row.text('question')}\nAnswer:",
    answers=lambda row: (row.text("answer"),),
    shots=5,
    answer_tokens=256,
    stop=("Question:", "</s>", "<|im_end|>"),
)
GSM8K_FLEXIBLE = replace(
    GSM8K, summary="mathematics in words; the last number of the answer", metric="gsm8k-flexible"
)


def _lines(row: Record, *fields: str) -> tuple[str, ...]:
    """The text, or the texts, of the first of the fields that a row has, each on one line."""
    field = next((name for name in fields if name in row.fields), fields[0])
    texts = row.texts(field) if isinstance(row.fields.get(field), list) else (row.text(field),)
    return tuple(" ".join(text.split()) for text in texts)


# Fields of CNN/DM, and of SciTLDR.
SUMMARIES = ShotsTask(
    "summaries of a text behind worked examples; ROUGE-L, the best of several references",
    name="summaries",
    published="in SciTLDR-Data/SciTLDR-A of allenai/scitldr; rows of article and highlights (CNN/DM) do as well",
    metric="first-line-longbench-rouge-l",
    ask=lambda row: f"Text: {' '.join(_lines(row, 'article', 'source'))}\nSummary:",
    answers=lambda row: _lines(row, "highlights", "target"),
    shots=4,
    answer_tokens=128,
    stop=("\nText:",),
    train=False,
)
SUMMARIES_ROUGE_2 = replace(
    SUMMARIES, summary="summaries of a text behind worked examples; ROUGE-2", metric="first-line-rouge-2"
)
