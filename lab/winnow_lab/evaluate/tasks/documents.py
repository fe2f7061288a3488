"""A document in prose with facts about people, and many questions about it."""

import random
from itertools import islice

from winnow.errors import EvaluationError
from winnow_lab.evaluate.demo_tasks import Haystack
from winnow_lab.evaluate.demo_tasks.haystack import scatter
from winnow_lab.evaluate.demo_tasks.words import NAMES
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.draws import shuffled
from winnow_lab.evaluate.tasks.in_prose import samples_in_prose
from winnow_lab.evaluate.tasks.task import TaskSettings

_CATEGORY = "facts"
_QUESTIONS = 20
_SAMPLES = 5
_ANSWER_TOKENS = 24

# What is said of a person, what is asked, what the answer begins with, and values of one kind.
_FACTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "{name} was born in the town of {value}.",
        "In which town was {name} born?",
        "{name} was born in the town of",
        (
            "Ashford",
            "Brindle",
            "Corwen",
            "Dunmore",
            "Elmswell",
            "Fenwick",
            "Garstang",
            "Hexham",
            "Ludlow",
            "Wexford",
        ),
    ),
    (
        "{name} keeps a {value} as a pet.",
        "What animal does {name} keep as a pet?",
        "{name} keeps a",
        (
            "parrot",
            "tortoise",
            "ferret",
            "rabbit",
            "lizard",
            "hedgehog",
            "pigeon",
            "goat",
            "hamster",
            "snake",
        ),
    ),
    (
        "For many years {name} has worked as a {value}.",
        "What does {name} work as?",
        "{name} works as a",
        (
            "baker",
            "surveyor",
            "plumber",
            "librarian",
            "tailor",
            "dentist",
            "chemist",
            "gardener",
            "pilot",
            "welder",
        ),
    ),
    (
        "The house number of {name} is {value}.",
        "What is the house number of {name}?",
        "The house number of {name} is",
        tuple(str(number) for number in range(1203, 9800, 859)),
    ),
    (
        "Every summer {name} travels to {value}.",
        "Where does {name} travel every summer?",
        "Every summer {name} travels to",
        (
            "Norway",
            "Portugal",
            "Iceland",
            "Greece",
            "Hungary",
            "Morocco",
            "Finland",
            "Croatia",
            "Estonia",
            "Tunisia",
        ),
    ),
)


class Documents:
    """Facts at random places of prose, `settings.questions` of which are asked for; 20 where one is asked for.

    As `winnow eval` computes it, the document is read and compressed once where a policy judges it without the
    questions. Each question names a person of its own.
    """

    summary = "a document in prose, and many questions about facts in it"
    categories = (_CATEGORY,)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """See `Task`."""
        return samples_in_prose(settings, self.categories, _SAMPLES, document_sample)


DOCUMENTS = Documents()


def document_sample(
    settings: TaskSettings, haystack: Haystack, category: str, tokens: int, number: int
) -> Sample:
    """Return a passage of `haystack` with facts in it and a question about each; raises EvaluationError where `tokens`
    leave no room for one."""
    rng = random.Random(f"{settings.seed}/documents/{tokens}/{number}")
    count = settings.questions if settings.questions > 1 else _QUESTIONS
    if count > len(NAMES):
        raise EvaluationError(f"--questions must be at most {len(NAMES)} for documents, got {count}")
    facts, questions = [], []
    for place, person in enumerate(islice(shuffled(rng, len(NAMES)), count)):
        statement, asked, begun, values = _FACTS[place % len(_FACTS)]
        name, value = NAMES[person], rng.choice(values)
        facts.append(statement.format(name=name, value=value))
        questions.append(
            Question(
                text=f"\n\nAnswer from the text above in a few words. {asked.format(name=name)}",
                prefix=" " + begun.format(name=name),
                references=(value,),
                metric="match-part",
                max_tokens=_ANSWER_TOKENS,
                stop=("\n", "."),
            )
        )
    room = tokens - _ANSWER_TOKENS - sum(settings.count_tokens(" " + fact) for fact in facts)
    room -= max(settings.count_tokens(question.plain) for question in questions)
    prose = haystack.passage(rng, room)
    if not prose:
        raise EvaluationError(f"--tokens {tokens} leaves no room for prose around the {count} facts")
    rng.shuffle(facts)
    return Sample(
        name=f"{category}/{tokens}/{number}",
        category=category,
        context=" ".join(scatter(rng, facts, prose)),
        questions=tuple(questions),
        chat=True,
        length=tokens,
    )
