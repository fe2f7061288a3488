"""The value of one key among many in a JSON object ("Lost in the Middle", arXiv:2307.03172, section 4)."""

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from winnow.errors import EvaluationError
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.draws import chosen, distinct
from winnow_lab.evaluate.tasks.files import Record, find_file, has_file, read_json_lines, shipped
from winnow_lab.evaluate.tasks.fit import check_lengths, largest_fitting
from winnow_lab.evaluate.tasks.task import TaskSettings

_FILES = MappingProxyType({f"{keys}-keys": f"kv-retrieval-{keys}_keys.jsonl" for keys in (75, 140, 300)})
_GROWN = "grown"
# Published: 500 objects of each size, and answers of at most 100 tokens.
_SAMPLES = 500
_ANSWER_TOKENS = 100

Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class _Example:
    """An object, and the key whose value is asked for first."""

    pairs: Pairs
    key: str


class KeyValueRetrieval:
    """UUIDs as keys and values: published objects of 75, 140 and 300 keys, and grown ones of any length.

    A sample of the published objects of 75 keys ships with Winnow. Where all categories are asked for, published sizes
    whose file is missing or whose prompts the model does not take are left out; named, they raise. Further questions on
    the same object ask for other keys.
    """

    summary = "the value of a key among many, all of them UUIDs"
    categories = (*_FILES, _GROWN)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """See `Task`."""
        samples: list[Sample] = []
        for category in settings.categories or (*_present(settings), _GROWN):
            samples += _grown(settings) if category == _GROWN else _published(settings, category)
        return samples


KV_RETRIEVAL = KeyValueRetrieval()


def _present(settings: TaskSettings) -> list[str]:
    """Return the published sizes whose file is there; a data directory must have one of them."""
    present = [category for category, name in _FILES.items() if has_file(_directory(settings), name)]
    if not present:
        _find(settings, next(iter(_FILES)))
    return present


def _published(settings: TaskSettings, category: str) -> list[Sample]:
    examples = list(enumerate(read_examples(_find(settings, category)), start=1))
    samples = []
    for number, example in chosen(random.Random(f"{settings.seed}/{category}"), examples, settings.samples):
        sample = _sample(settings, f"{category}/{number}", category, example)
        tokens = _tokens(settings, sample)
        if tokens <= settings.max_model_len:
            samples.append(sample)
        elif category in settings.categories:
            raise EvaluationError(
                f"{category}: prompt and answer take {tokens} tokens, the model {settings.max_model_len}; "
                f"the length of the category {_GROWN} is free"
            )
        else:
            return []
    return samples


def _directory(settings: TaskSettings) -> Path:
    return settings.data or shipped("kv_retrieval")


def _find(settings: TaskSettings, category: str) -> Path:
    return find_file(_directory(settings), _FILES[category], "by the project Lost in the Middle")


def _grown(settings: TaskSettings) -> list[Sample]:
    check_lengths(settings)
    count = _SAMPLES if settings.samples is None else settings.samples
    return [_fitted(settings, tokens, number) for tokens in settings.tokens for number in range(count)]


def _fitted(settings: TaskSettings, tokens: int, number: int) -> Sample:
    """Return the largest object that fits, with its question and answer, into a number of tokens."""
    name = f"{_GROWN}/{tokens}/{number}"

    def make(more: int) -> Sample:
        """Return the sample with this many pairs besides one for each question."""
        example = _generated(f"{settings.seed}/{name}", settings.questions + more)
        return _sample(settings, name, _GROWN, example, tokens)

    more = largest_fitting(lambda size: _tokens(settings, make(size)), tokens)
    if more is None:
        raise EvaluationError(
            f"--tokens {tokens}: too few for an object with a key for each of {settings.questions} questions"
        )
    return make(more)


def _generated(seed: str, size: int) -> _Example:
    rng = random.Random(seed)
    names = distinct(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))
    pairs = [(next(names), next(names)) for _ in range(size)]
    return _Example(pairs, random.Random(f"{seed}/key").choice(pairs)[0])


def _sample(
    settings: TaskSettings, name: str, category: str, example: _Example, length: int | None = None
) -> Sample:
    """Return the prompt of the repository's `kv_retrieval.prompt`."""
    json_data = "{" + ",\n ".join(f'"{key}": "{value}"' for key, value in example.pairs) + "}"
    values = dict(example.pairs)
    others = [key for key in values if key != example.key]
    random.Random(f"{settings.seed}/{name}/others").shuffle(others)
    return Sample(
        name=name,
        category=category,
        context=(
            "Extract the value corresponding to the specified key in the JSON object below.\n\n"
            f"JSON data:\n{json_data}"
        ),
        questions=tuple(
            Question(
                text=f'\n\nKey: "{key}"',
                prefix="\nCorresponding value:",
                references=(values[key],),
                metric="match-part",
                max_tokens=_ANSWER_TOKENS,
            )
            for key in [example.key, *others[: settings.questions - 1]]
        ),
        length=length,
    )


def _tokens(settings: TaskSettings, sample: Sample) -> int:
    return _ANSWER_TOKENS + max(
        settings.count_tokens(sample.context + each.plain) for each in sample.questions
    )


def read_examples(path: Path) -> list[_Example]:
    """Return lines of `{"ordered_kv_records": [[key, value], ...], "key", "value"}`.

    Raises:
        DatasetError: the file cannot be read, or a line is malformed.
    """
    return [_Example(_pairs(row), row.text("key")) for row in read_json_lines(path)]


def _pairs(row: Record) -> Pairs:
    """Return the records, among them the key with its value."""
    pairs: list[tuple[str, str]] = []
    for pair in row.entries("ordered_kv_records"):
        match pair:
            case [str(key), str(value)]:
                pairs.append((key, value))
            case _:
                row.fail("'ordered_kv_records' must be a list of pairs of strings")
    if (row.text("key"), row.text("value")) not in pairs:
        row.fail("'key' and 'value' are no pair of 'ordered_kv_records'")
    return pairs
