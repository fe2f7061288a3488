"""Settings of tasks for tests: a plain way to count tokens, and no limit of a model."""

import re
from typing import Any

from winnow_lab.evaluate.tasks import TaskSettings


def count_tokens(text: str) -> int:
    """A stand-in for a tokenizer: words, in pieces of four letters, and signs."""
    return len(re.findall(r"\w{1,4}|[^\w\s]|\n", text))


def plain_settings(**options: Any) -> TaskSettings:
    """Settings with a stand-in for the model."""
    options = {"max_model_len": 10**6, **options}
    return TaskSettings(count_tokens=count_tokens, truncate=lambda text, most: text, **options)
