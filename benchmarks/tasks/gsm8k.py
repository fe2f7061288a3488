"""GSM8K: grade-school mathematics in words, worked out step by step (arXiv:2110.14168)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.tasks import DATA
from benchmarks.tasks.shots import grouped, require_room, shots_asked
from winnow.evaluate.sample import Question, Sample
from winnow.evaluate.tasks.draws import chosen
from winnow.evaluate.tasks.files import Record, find_file, read_json_lines
from winnow.evaluate.tasks.task import TaskSettings

_SHOTS = 5
_ANSWER_TOKENS = 256
_PUBLISHED = "in grade_school_math/data of openai/grade-school-math"


@dataclass(frozen=True)
class Gsm8kTask:
    """GSM8K as lm-evaluation-harness asks it: worked examples of the training set, then a question of the test set.

    The examples of each sample are drawn for it. Where several questions share a context, they share its examples.

    Attributes:
        metric: "gsm8k-strict" looks for the number behind "####", "gsm8k-flexible" takes the last number there is.
    """

    summary: str
    metric: str
    categories: tuple[str, ...] = ("gsm8k",)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """See `Task`. `settings.samples` counts contexts, with `settings.questions` questions each."""
        data = DATA / "gsm8k" if settings.data is None else settings.data
        test = list(enumerate(read_json_lines(find_file(data, "test.jsonl", _PUBLISHED)), start=1))
        train = list(read_json_lines(find_file(data, "train.jsonl", _PUBLISHED)))
        shots = shots_asked(settings, _SHOTS, len(train))
        wanted = None if settings.samples is None else settings.samples * settings.questions
        asked = chosen(random.Random(f"{settings.seed}/gsm8k"), test, wanted)
        return [
            require_room(self._sample(rows, train, shots, settings.seed), settings)
            for rows in grouped(asked, settings.questions)
        ]

    def _sample(
        self, rows: Sequence[tuple[int, Record]], train: Sequence[Record], shots: int, seed: int
    ) -> Sample:
        name = f"gsm8k/{rows[0][0]}"
        examples = random.Random(f"{seed}/{name}").sample(train, shots)
        return Sample(
            name=name,
            category="gsm8k",
            context="".join(f"{_asked(row)} {row.text('answer')}\n\n" for row in examples),
            questions=tuple(
                Question(
                    text=_asked(row),
                    references=(row.text("answer"),),
                    metric=self.metric,
                    max_tokens=_ANSWER_TOKENS,
                    stop=("Question:", "</s>", "<|im_end|>"),
                )
                for _, row in rows
            ),
        )


def _asked(row: Record) -> str:
    return f"Question: {row.text('question')}\nAnswer:"


GSM8K = Gsm8kTask("mathematics in words; the number behind ####", "gsm8k-strict")
GSM8K_FLEXIBLE = Gsm8kTask("mathematics in words; the last number of the answer", "gsm8k-flexible")
