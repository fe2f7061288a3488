"""Facts of a model that tasks need: how it counts tokens, and how many it takes."""

from typing import TYPE_CHECKING, Any

from winnow.errors import EvaluationError
from winnow_lab.evaluate.tasks.task import TaskSettings

if TYPE_CHECKING:
    from winnow.llm import LLM


def settings_for(llm: "LLM", **options: Any) -> TaskSettings:
    """Return `TaskSettings` for a model; `options` are its other fields.

    Raises:
        EvaluationError: the model's directory has no tokenizer.
    """
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise EvaluationError("an evaluation needs a tokenizer, which the model's directory does not have")

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def truncate(text: str, most: int) -> str:
        tokens = encode(text)
        if len(tokens) <= most:
            return text
        front = (most + 1) // 2
        back = tokens[len(tokens) - (most - front) :]
        return str(tokenizer.decode(tokens[:front])) + str(tokenizer.decode(back))

    return TaskSettings(
        count_tokens=lambda text: len(encode(text)),
        truncate=truncate,
        max_model_len=llm.max_model_len,
        **options,
    )
