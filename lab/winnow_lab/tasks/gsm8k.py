"""Mathematics in words (GSM8K, arXiv:2110.14168), as lm-evaluation-harness asks it."""

from dataclasses import replace

from winnow_lab.evaluate.tasks.files import Record
from winnow_lab.tasks.shots import ShotsTask


def _asked(row: Record) -> str:
    return f"Question: {row.text('question')}\nAnswer:"


def _answers(row: Record) -> tuple[str, ...]:
    return (row.text("answer"),)


GSM8K = ShotsTask(
    "mathematics in words; the number behind ####",
    name="gsm8k",
    published="in grade_school_math/data of openai/grade-school-math",
    metric="gsm8k-strict",
    ask=_asked,
    answers=_answers,
    shots=5,
    answer_tokens=256,
    stop=("Question:", "</s>", "<|im_end|>"),
)
GSM8K_FLEXIBLE = replace(
    GSM8K, summary="mathematics in words; the last number of the answer", metric="gsm8k-flexible"
)
