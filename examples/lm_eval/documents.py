"""Tasks of lm_eval: facts hidden in the prose that ships with Winnow, and trivia from a file; nothing is downloaded."""

import gzip
import json
import random
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer

from winnow.models import DEMO_MODEL
from winnow_lab.evaluate.demo_tasks import Haystack, make_document
from winnow_lab.evaluate.tasks.files import shipped_sentences


def lookup(documents: int, tokens: int, seed: int = 0, **metadata: Any) -> dict[str, Dataset]:
    """That many contexts of `tokens` tokens with one question each; wrong choices are answers of other documents."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, local_files_only=True)
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    haystack, draw = Haystack.build(shipped_sentences(), count_tokens), random.Random(seed)  # noqa: S311
    samples = [
        make_document("single", draw, haystack, count_tokens, tokens).sample() for _ in range(documents)
    ]
    answers = sorted({sample.answer for sample in samples})
    rows = []
    for sample in samples:
        others = draw.sample([answer for answer in answers if answer != sample.answer], 3)
        rows.append(
            {
                "context": sample.context,
                "question": sample.question,
                "answer": sample.answer,
                "choices": sorted([sample.answer, *others]),
            }
        )
    return {"test": Dataset.from_list(rows)}


def trivia(file: str, questions: int, seed: int = 0, **metadata: Any) -> dict[str, Dataset]:
    """That many questions of OpenTriviaQA (CC BY-SA 4.0) with four answers, and as many others for worked examples.

    A line of the file has `question`, `answer` and `choices`; categories lie one behind the other.
    """
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if len(row["choices"]) == 4]
    rows = [row for row in rows if row["answer"] in row["choices"]]  # of some it is not
    drawn = random.Random(seed).sample(rows, 2 * questions)  # noqa: S311
    return {"test": Dataset.from_list(drawn[:questions]), "train": Dataset.from_list(drawn[questions:])}
