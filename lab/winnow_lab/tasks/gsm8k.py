"""Mathematics in words (GSM8K, arXiv:2110.14168), as lm-evaluation-harness asks it."""

from dataclasses import replace

from winnow_lab.tasks.shots import ShotsTask

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
