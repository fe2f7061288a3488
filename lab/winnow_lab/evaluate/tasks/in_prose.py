"""Tasks that hide something in the prose that ships, at every length: the demo model's, needles, facts to ask for."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from winnow.errors import EvaluationError
from winnow_lab.evaluate.demo_tasks import CATEGORIES, Haystack, make_document, question_suffix
from winnow_lab.evaluate.demo_tasks.haystack import scatter
from winnow_lab.evaluate.demo_tasks.words import NAMES
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.draws import shuffled
from winnow_lab.evaluate.tasks.files import shipped_sentences
from winnow_lab.evaluate.tasks.task import TaskSettings, check_lengths

# Tokens that may follow beyond the length of the right answer.
_ANSWER_ROOM = 8


def _samples(
    settings: TaskSettings,
    categories: Sequence[str],
    default_samples: int,
    make: Callable[[TaskSettings, Haystack, str, int, int], Sample],
) -> list[Sample]:
    """`settings.samples` of every length and category; `make` gets the prose, category, tokens and number of each."""
    check_lengths(settings)
    haystack = Haystack.build(shipped_sentences(), settings.count_tokens)
    return [
        make(settings, haystack, category, tokens, number)
        for tokens in settings.tokens
        for category in settings.categories or categories
        for number in range(default_samples if settings.samples is None else settings.samples)
    ]


class DemoTask:
    """Tasks that the demo model was trained for (`winnow_lab.evaluate.demo_tasks`)."""

    summary = "eight kinds of retrieval in prose, for the demo model"
    categories = tuple(CATEGORIES)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        return _samples(settings, self.categories, 10, _demo_sample)


DEMO = DemoTask()


def _demo_sample(
    settings: TaskSettings, haystack: Haystack, category: str, tokens: int, number: int
) -> Sample:
    rng = random.Random(f"{settings.seed}/{category}/{tokens}/{number}")
    count_tokens, room = settings.count_tokens, tokens - _ANSWER_ROOM
    try:
        document = make_document(category, rng, haystack, count_tokens, room, questions=settings.questions)
    except ValueError as error:
        raise EvaluationError(f"--tokens {tokens}: {error}") from None
    questions = (
        Question(
            text=question_suffix(question.text),
            references=(question.answer,),
            metric=document.metric,
            max_tokens=count_tokens(" " + question.answer) + _ANSWER_ROOM,
        )
        for question in document.questions
    )
    name = f"{category}/{tokens}/{number}"
    return Sample(name, category, document.context, tuple(questions), length=tokens)


DEPTHS = tuple(range(0, 101, 10))
"""Percent of the prose that stands before the needle."""
_DIGITS = 4


@dataclass(frozen=True)
class NeedleTask:
    """Pass keys of people, each asked for by the person's name; categories are depths (Kamradt 2023).

    With several questions a context holds a needle for each: the first at the category's depth, the others anywhere.

    Attributes:
        chat: ask as one message of a chat, in a sentence that says what form the answer has, and accept an answer that
            holds the key among other words; else in the form that the demo model was trained on.
    """

    summary: str
    chat: bool = False
    categories: tuple[str, ...] = tuple(f"depth-{depth}" for depth in DEPTHS)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        return _samples(settings, self.categories, 5, self._sample)

    def _sample(
        self, settings: TaskSettings, haystack: Haystack, category: str, tokens: int, number: int
    ) -> Sample:
        rng = random.Random(f"{settings.seed}/needle/{category}/{tokens}/{number}")
        if settings.questions > len(NAMES):
            raise EvaluationError(
                f"--questions must be at most {len(NAMES)} for needles, got {settings.questions}"
            )
        people = rng.sample(NAMES, settings.questions)
        keys = [str(rng.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)) for _ in people]
        needles = [f"The pass key of {person} is {key}." for person, key in zip(people, keys, strict=True)]
        questions = tuple(self._question(person, key) for person, key in zip(people, keys, strict=True))
        room = tokens - _ANSWER_ROOM - _DIGITS
        room -= sum(settings.count_tokens(" " + needle) for needle in needles)
        room -= max(settings.count_tokens(question.text) for question in questions)
        prose = haystack.passage(rng, room)
        if not prose:
            raise EvaluationError(f"--tokens {tokens} leaves no room for prose around the needles")
        for needle in needles[1:]:
            prose.insert(rng.randrange(len(prose) + 1), needle)
        prose.insert(_place(prose, int(category.removeprefix("depth-"))), needles[0])
        name = f"{category}/{tokens}/{number}"
        return Sample(name, category, " ".join(prose), questions, self.chat, tokens)

    def _question(self, person: str, key: str) -> Question:
        asked = f"What is the pass key of {person}?"
        if self.chat:
            text = f"\n\n{asked} Answer with the number alone."
            return Question(text, (key,), "match-all", max_tokens=_DIGITS + 3 * _ANSWER_ROOM)
        return Question(question_suffix(asked), (key,), "exact", max_tokens=_DIGITS + _ANSWER_ROOM)


NEEDLE = NeedleTask("a pass key at a given depth of prose, asked as the demo model was taught")
NEEDLE_CHAT = NeedleTask("a pass key at a given depth of prose, asked through the chat template", chat=True)


def _place(prose: list[str], depth: int) -> int:
    """The sentence before which `depth` percent of the letters stand, as near as sentences allow."""
    ends = [0]
    for sentence in prose:
        ends.append(ends[-1] + len(sentence) + 1)
    wanted = ends[-1] * depth / 100
    return min(range(len(ends)), key=lambda place: abs(ends[place] - wanted))


# What is said of a person, what is asked, what the answer begins with, and values of one kind.
_FACTS = (
    (
        "{name} was born in the town of {value}.",
        "In which town was {name} born?",
        "{name} was born in the town of",
        "Ashford Brindle Corwen Dunmore Elmswell Fenwick Garstang Hexham Ludlow Wexford",
    ),
    (
        "{name} keeps a {value} as a pet.",
        "What animal does {name} keep as a pet?",
        "{name} keeps a",
        "parrot tortoise ferret rabbit lizard hedgehog pigeon goat hamster snake",
    ),
    (
        "For many years {name} has worked as a {value}.",
        "What does {name} work as?",
        "{name} works as a",
        "baker surveyor plumber librarian tailor dentist chemist gardener pilot welder",
    ),
    (
        "The house number of {name} is {value}.",
        "What is the house number of {name}?",
        "The house number of {name} is",
        " ".join(str(number) for number in range(1203, 9800, 859)),
    ),
    (
        "Every summer {name} travels to {value}.",
        "Where does {name} travel every summer?",
        "Every summer {name} travels to",
        "Norway Portugal Iceland Greece Hungary Morocco Finland Croatia Estonia Tunisia",
    ),
)
_FACTS_ASKED, _FACT_TOKENS = 20, 24


class Documents:
    """Facts at random places of prose, `settings.questions` of which are asked for; 20 where one is asked for.

    As `winnow eval` computes it, the document is read and compressed once where a policy judges it without the
    questions. Each question names a person of its own.
    """

    summary = "a document in prose, and many questions about facts in it"
    categories = ("facts",)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        return _samples(settings, self.categories, 5, document_sample)


DOCUMENTS = Documents()


def document_sample(
    settings: TaskSettings, haystack: Haystack, category: str, tokens: int, number: int
) -> Sample:
    """A passage of `haystack` with facts in it and a question about each."""
    rng = random.Random(f"{settings.seed}/documents/{tokens}/{number}")
    count = settings.questions if settings.questions > 1 else _FACTS_ASKED
    if count > len(NAMES):
        raise EvaluationError(f"--questions must be at most {len(NAMES)} for documents, got {count}")
    facts, questions = [], []
    for place, person in enumerate(islice(shuffled(rng, len(NAMES)), count)):
        statement, asked, begun, values = _FACTS[place % len(_FACTS)]
        name, value = NAMES[person], rng.choice(values.split())
        facts.append(statement.format(name=name, value=value))
        questions.append(
            Question(
                text=f"\n\nAnswer from the text above in a few words. {asked.format(name=name)}",
                prefix=" " + begun.format(name=name),
                references=(value,),
                metric="match-part",
                max_tokens=_FACT_TOKENS,
                stop=("\n", "."),
            )
        )
    room = tokens - _FACT_TOKENS - sum(settings.count_tokens(" " + fact) for fact in facts)
    room -= max(settings.count_tokens(question.plain) for question in questions)
    prose = haystack.passage(rng, room)
    if not prose:
        raise EvaluationError(f"--tokens {tokens} leaves no room for prose around the {count} facts")
    rng.shuffle(facts)
    context = " ".join(scatter(rng, facts, prose))
    return Sample(f"{category}/{tokens}/{number}", category, context, tuple(questions), True, tokens)
