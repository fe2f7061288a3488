"""Texts that are on most machines, licences and chapters of Python's manual, with questions about them."""

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

from winnow_lab.evaluate.demo_tasks import Haystack
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.documents import document_sample
from winnow_lab.evaluate.tasks.files import shipped_sentences
from winnow_lab.evaluate.tasks.task import TaskSettings

TEXTS, FACTS = 10, 5
LICENCES = Path("/usr/share/common-licenses")
# The shorter ones first, as lengths rise.
NAMED = ("Apache-2.0", "MPL-2.0", "GPL-2", "GFDL-1.3", "LGPL-2.1", "GPL-3")
SUMMARISE = Question("\n\nSummarise the text above in three sentences.", (), "", max_tokens=128)
LONGEST_SENTENCE = 400


def manual_samples(settings: TaskSettings, _: int) -> list[Sample]:
    """Ten texts of lengths from the first to the second of `settings.tokens`, each with planted facts that are asked
    for; and the wish for a summary, whose question has no references, since nothing judges it."""
    low, high = settings.tokens
    samples = []
    for place, (name, text) in enumerate(islice(texts(), TEXTS)):
        length = low + (high - low) * place // (TEXTS - 1)
        haystack = Haystack.build(text, settings.count_tokens)
        sample = document_sample(replace(settings, questions=FACTS), haystack, name, length, place)
        samples.append(replace(sample, questions=(*sample.questions, SUMMARISE)))
    return samples


def texts() -> Iterator[tuple[str, list[str]]]:
    """Names and sentences: prose that ships with Winnow, licences that are here, the longest of Python's topics."""
    yield "prose", list(shipped_sentences())
    for path in (*(LICENCES / name for name in NAMED), Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"):
        if path.is_file():
            yield path.name, sentences(path.read_text(encoding="utf-8"))
    for topic in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        yield topic, sentences(topics[topic])


def sentences(text: str) -> list[str]:
    """Sentences of a text in lines, without those that are too long for one."""
    found = re.split(r"(?<=[.;:])\s+", " ".join(text.split()))
    return [sentence for sentence in found if 0 < len(sentence) <= LONGEST_SENTENCE]
