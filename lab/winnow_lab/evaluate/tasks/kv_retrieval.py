"""The value of one key among many in a JSON object ("Lost in the Middle", arXiv:2307.03172, section 4)."""

import random
import uuid
from pathlib import Path
from types import MappingProxyType

from winnow.errors import EvaluationError
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.draws import chosen, distinct
from winnow_lab.evaluate.tasks.files import Record, find_file, has_file, read_json_lines, shipped
from winnow_lab.evaluate.tasks.task import TaskSettings, check_lengths, largest_fitting

_FILES = MappingProxyType({f"{keys}-keys": f"kv-retrieval-{keys}_keys.jsonl" for keys in (75, 140, 300)})
_GROWN = "grown"
# Published: 500 objects of each size, and answers of at most 100 tokens.
_SAMPLES = 500
_ANSWER_TOKENS = 100


class KeyValueRetrieval:
    """UUIDs as keys and values: published objects of 75, 140 and 300 keys, and grown ones of any length.

    A sample of the published objects of 75 keys ships with Winnow. Where all categories are asked for, published sizes
    whose file is missing or whose prompts the model does not take are left out; named, they raise. Further questions on
    the same object ask for other keys.
    """

    summary = "the value of a key among many, all of them UUIDs"
    categories = (*_FILES, _GROWN)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        data = settings.data or shipped("kv_retrieval")
        present = [category for category, name in _FILES.items() if has_file(data, name)]
        # A data directory must have one of the published sizes, the first of which is named where it has none.
        published = present or [next(iter(_FILES))]
        samples: list[Sample] = []
        count = _SAMPLES if settings.samples is None else settings.samples
        for category in settings.categories or (*published, _GROWN):
            if category == _GROWN:
                check_lengths(settings)
                samples += [_fitted(settings, each, n) for each in settings.tokens for n in range(count)]
            else:
                samples += _published(settings, data, category)
        return samples


KV_RETRIEVAL = KeyValueRetrieval()


def _published(settings: TaskSettings, data: Path, category: str) -> list[Sample]:
    path = find_file(data, _FILES[category], "by the project Lost in the Middle")
    rows = [
        (number, _pairs(row), row.text("key")) for number, row in enumerate(read_json_lines(path), start=1)
    ]
    samples = []
    for number, pairs, key in chosen(random.Random(f"{settings.seed}/{category}"), rows, settings.samples):
        sample = _sample(settings, f"{category}/{number}", category, pairs, key)
        tokens = _tokens(settings, sample)
        if tokens > settings.max_model_len:
            if category not in settings.categories:
                return []
            raise EvaluationError(
                f"{category}: prompt and answer take {tokens} tokens, the model {settings.max_model_len}; "
                f"the length of the category {_GROWN} is free"
            )
        samples.append(sample)
    return samples


def _fitted(settings: TaskSettings, tokens: int, number: int) -> Sample:
    """The largest object that fits, with its question and answer, into a number of tokens."""
    name = f"{_GROWN}/{tokens}/{number}"
    seed = f"{settings.seed}/{name}"

    def make(more: int) -> Sample:
        rng = random.Random(seed)
        names = distinct(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))
        pairs = [(next(names), next(names)) for _ in range(settings.questions + more)]
        key = random.Random(f"{seed}/key").choice(pairs)[0]
        return _sample(settings, name, _GROWN, pairs, key, tokens)

    more = largest_fitting(lambda size: _tokens(settings, make(size)), tokens)
    if more is None:
        raise EvaluationError(
            f"--tokens {tokens}: too few for an object with a key for each of {settings.questions} questions"
        )
    return make(more)


def _sample(
    settings: TaskSettings,
    name: str,
    category: str,
    pairs: list[tuple[str, str]],
    first: str,
    length: int | None = None,
) -> Sample:
    """The prompt of the repository's `kv_retrieval.prompt`; `first` is the key whose value is asked for first."""
    json_data = "{" + ",\n ".join(f'"{key}": "{value}"' for key, value in pairs) + "}"
    values = dict(pairs)
    others = [key for key in values if key != first]
    random.Random(f"{settings.seed}/{name}/others").shuffle(others)
    questions = (
        Question(
            text=f'\n\nKey: "{key}"',
            prefix="\nCorresponding value:",
            references=(values[key],),
            metric="match-part",
            max_tokens=_ANSWER_TOKENS,
        )
        for key in [first, *others[: settings.questions - 1]]
    )
    context = (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        f"JSON data:\n{json_data}"
    )
    return Sample(name, category, context, tuple(questions), length=length)


def _tokens(settings: TaskSettings, sample: Sample) -> int:
    counts = (settings.count_tokens(sample.context + each.plain) for each in sample.questions)
    return _ANSWER_TOKENS + max(counts)


def _pairs(row: Record) -> list[tuple[str, str]]:
    """The records of a line `{"ordered_kv_records": [[key, value], ...], "key", "value"}`, which name its key."""
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
