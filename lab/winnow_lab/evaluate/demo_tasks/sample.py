"""Sample of a task generator: one context, questions about it, and a single question as the engine sees it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question and its only right answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class DemoSample:
    """One prompt with its reference; `metric` is a key of `winnow.metrics.METRICS`."""

    category: str
    context: str
    question: str
    answer: str
    metric: str

    @property
    def prompt(self) -> str:
        """Context and question in the form the demo model was trained on; the answer follows after a space."""
        return self.context + question_suffix(self.question)


@dataclass(frozen=True)
class DemoDocument:
    """One context with several questions, each answerable from the context alone."""

    category: str
    context: str
    questions: tuple[Question, ...]
    metric: str

    def sample(self, index: int = 0) -> DemoSample:
        """Return the context with only the question at `index`."""
        question = self.questions[index]
        return DemoSample(self.category, self.context, question.text, question.answer, self.metric)


def question_suffix(question: str) -> str:
    """Return what stands between a context (or an earlier answer) and the answer to `question`."""
    return f"\nQuestion: {question}\nAnswer:"
