"""LongBench: questions, summaries, examples, retrieval and code over long documents (arXiv:2308.14508)."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

from winnow.errors import EvaluationError
from winnow_lab.evaluate.metrics import require_metric, score
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.draws import chosen, worked_examples
from winnow_lab.evaluate.tasks.files import Record, find_file, read_json, read_json_lines, shipped
from winnow_lab.evaluate.tasks.task import TaskSettings

# Tokens that a chat template and special tokens may add to a prompt that was cut.
_TEMPLATE_ROOM = 128


@dataclass(frozen=True)
class Subset:
    """One subset; its prompt and the length of its answers stand in files.

    Attributes:
        metric: a key of `winnow_lab.evaluate.metrics.METRICS`.
        chat: whether the prompt goes through the model's chat template. Examples and code to be continued do not.
    """

    metric: str
    chat: bool = True
    stop: tuple[str, ...] = ()


_QUESTIONS = Subset("qa-f1")
_SUMMARY = Subset("longbench-rouge-l")
_CODE = Subset("edit-sim", chat=False)

SUBSETS: Mapping[str, Subset] = MappingProxyType(
    {
        "narrativeqa": _QUESTIONS,
        "qasper": _QUESTIONS,
        "multifieldqa_en": _QUESTIONS,
        "hotpotqa": _QUESTIONS,
        "2wikimqa": _QUESTIONS,
        "musique": _QUESTIONS,
        "gov_report": _SUMMARY,
        "qmsum": _SUMMARY,
        "multi_news": _SUMMARY,
        "trec": Subset("first-line-classification", chat=False),
        "triviaqa": Subset("first-line-qa-f1", chat=False),
        # LongBench also bans a newline as the first token; here an answer that begins with one is empty.
        "samsum": Subset("first-line-longbench-rouge-l", chat=False, stop=("\n",)),
        "passage_count": Subset("count"),
        "passage_retrieval_en": Subset("retrieval"),
        "lcc": _CODE,
        "repobench-p": _CODE,
    }
)
"""The English subsets."""
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "one document": ("narrativeqa", "qasper", "multifieldqa_en"),
        "several documents": ("hotpotqa", "2wikimqa", "musique"),
        "summaries": ("gov_report", "qmsum", "multi_news"),
        "examples": ("trec", "triviaqa", "samsum"),
        "synthetic": ("passage_count", "passage_retrieval_en"),
        "code": ("lcc", "repobench-p"),
    }
)
"""The paper's six categories."""


@dataclass(frozen=True)
class LongBenchTask:
    """The 16 English subsets as LongBench publishes them: a directory with a file `<subset>.jsonl` for each.

    Prompts, middle cut, chat templates, lengths of answers and metrics are those of the original's `pred.py` and
    `eval.py`. A prompt is cut to what the model takes less the answer and the template. With `settings.shots`, other
    rows of the file stand in front as worked examples, which the original does not have.

    Attributes:
        plain: subsets that do without the chat template although the original uses it there.
        dropped: text that is left out of the original's prompts wherever it stands; empty: none.
    """

    summary: str
    plain: frozenset[str] = frozenset()
    dropped: str = ""
    categories: tuple[str, ...] = tuple(SUBSETS)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        if settings.data is None:
            raise EvaluationError(
                "LongBench does not ship with Winnow: --data names a directory with its files, such as qasper.jsonl"
            )
        names = settings.categories or self.categories
        for name in names:
            require_metric(SUBSETS[name].metric)
        return [sample for name in names for sample in self._subset(name, settings.data, settings)]

    def _subset(self, name: str, data: Path, settings: TaskSettings) -> Iterator[Sample]:
        path = find_file(data, f"{name}.jsonl", "with LongBench (THUDM/LongBench)")
        rows = list(enumerate(read_json_lines(path), start=1))
        prompt = read_json(shipped("longbench") / "dataset2prompt.json").text(name)
        template = prompt.replace(self.dropped, "") if self.dropped else prompt
        answer_tokens = read_json(shipped("longbench") / "dataset2maxlen.json").fields[name]
        most = settings.max_model_len - answer_tokens - _TEMPLATE_ROOM
        if most < 2:
            raise EvaluationError(
                f"{name} answers with up to {answer_tokens} tokens and a chat template may take {_TEMPLATE_ROOM}: "
                f"of the {settings.max_model_len} tokens that the model takes, none are left for the prompt"
            )
        for number, row in chosen(random.Random(f"{settings.seed}/{name}"), rows, settings.samples):
            context, question = _filled(template, row)
            if settings.shots:
                others = [other for place, other in rows if place != number]
                rng = random.Random(f"{settings.seed}/{name}/{number}")
                drawn = worked_examples(rng, others, settings.shots)
                context = "".join(_worked(template, each) for each in drawn) + context
            context, question = cut_middle(context, question, settings.truncate, most)
            yield Sample(
                name=f"{name}/{number}",
                category=name,
                context=context,
                questions=(_question(name, row, question, answer_tokens),),
                chat=SUBSETS[name].chat and name not in self.plain,
            )


def _filled(template: str, row: Record) -> tuple[str, str]:
    """Context and question of a prompt: the question is all that follows the example's context."""
    before, _, after = template.partition("{context}")
    return before + row.text("context"), after.replace("{input}", row.text("input"))


def _worked(template: str, row: Record) -> str:
    prompt = "".join(_filled(template, row))
    between = "" if prompt[-1].isspace() else " "
    return f"{prompt}{between}{row.texts('answers')[0]}\n\n"


def _question(name: str, row: Record, text: str, answer_tokens: int) -> Question:
    subset = SUBSETS[name]
    # null where the subset has no classes.
    classes = row.texts("all_classes") if subset.metric == "first-line-classification" else ()
    question = Question(text, row.texts("answers"), subset.metric, answer_tokens, subset.stop, classes)
    try:
        score(question.metric, "", question.references, question.classes)
    except ValueError as error:
        row.fail(f"'answers' do not suit {name}: {error}")
    return question


def cut_middle(
    context: str, question: str, truncate: Callable[[str, int], str], most: int
) -> tuple[str, str]:
    """The context and question, the middle of both together cut out so that at most that many tokens stay.

    The cut falls into the context, unless the question alone is longer than half of what may stay; then what is left of
    its end is the question.
    """
    whole = context + question
    cut = truncate(whole, most)
    if cut == whole:
        return context, question
    # The question, or as much of its end as is there. White space is not compared: some tokenizers change it when they
    # turn tokens back into text.
    places = [place for place in range(len(cut)) if not cut[place].isspace()]
    marks = [mark for mark in question if not mark.isspace()]
    pairs = zip(reversed(places), reversed(marks), strict=False)
    same = [place for place, _ in takewhile(lambda pair: cut[pair[0]] == pair[1], pairs)]
    start = same[-1] if same else len(cut)
    for _ in range(len(question) - len(question.lstrip())):
        if start > 0 and cut[start - 1].isspace():
            start -= 1
    return cut[:start], cut[start:]


LONGBENCH = LongBenchTask("LongBench's 16 English subsets; needs --data")
# KV-Compress's experiments (arXiv:2410.00161) leave the template off for counting passages, too.
LONGBENCH_KV_COMPRESS = LongBenchTask(
    "LongBench as KV-Compress measured it: passage_count without chat template; needs --data",
    plain=frozenset({"passage_count"}),
)
# Section 5.5: the line lowers the 70B model's scores with the full cache.
LONGBENCH_KV_COMPRESS_70B = replace(
    LONGBENCH_KV_COMPRESS,
    summary='the same for its 70B model: code prompts do not end with "Next line of code:"; needs --data',
    dropped="Next line of code:",
)
