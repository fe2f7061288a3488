"""Tasks that hide something in the prose that ships, at every length asked for."""

from collections.abc import Callable, Sequence

from winnow_lab.evaluate.demo_tasks import Haystack
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks.files import shipped_sentences
from winnow_lab.evaluate.tasks.fit import check_lengths
from winnow_lab.evaluate.tasks.task import TaskSettings

MakeSample = Callable[[TaskSettings, Haystack, str, int, int], Sample]
"""Settings, the prose, a category, tokens of prompt and answer, and the sample's number."""


def samples_in_prose(
    settings: TaskSettings, categories: Sequence[str], default_samples: int, make: MakeSample
) -> list[Sample]:
    """Return `settings.samples` of every length and category. Raises EvaluationError for a length too long."""
    check_lengths(settings)
    haystack = Haystack.build(shipped_sentences(), settings.count_tokens)
    count = default_samples if settings.samples is None else settings.samples
    return [
        make(settings, haystack, category, tokens, number)
        for tokens in settings.tokens
        for category in settings.categories or categories
        for number in range(count)
    ]
