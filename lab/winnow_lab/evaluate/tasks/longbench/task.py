"""LongBench: questions, summaries, examples, retrieval and code over long documents (arXiv:2308.14508)."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from winnow.errors import EvaluationError
from winnow.metrics import require_metric, score
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.draws import chosen, worked_examples
from winnow_lab.evaluate.tasks.files import Record, find_file, read_json, read_json_lines, shipped
from winnow_lab.evaluate.tasks.longbench.prompt import Template, cut_middle
from winnow_lab.evaluate.tasks.longbench.subsets import SUBSETS
from winnow_lab.evaluate.tasks.task import TaskSettings

# Tokens that a chat template and special tokens may add to a prompt that was cut.
_TEMPLATE_ROOM = 128


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
        """See `Task`."""
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
        template = Template.parse(prompt.replace(self.dropped, "") if self.dropped else prompt)
        answer_tokens = read_json(shipped("longbench") / "dataset2maxlen.json").fields[name]
        most = settings.max_model_len - answer_tokens - _TEMPLATE_ROOM
        if most < 2:
            raise EvaluationError(
                f"{name} answers with up to {answer_tokens} tokens and a chat template may take {_TEMPLATE_ROOM}: "
                f"of the {settings.max_model_len} tokens that the model takes, none are left for the prompt"
            )
        for number, row in chosen(random.Random(f"{settings.seed}/{name}"), rows, settings.samples):
            context, question = template.fill(row.text("context"), row.text("input"))
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


def _worked(template: Template, row: Record) -> str:
    prompt = "".join(template.fill(row.text("context"), row.text("input")))
    between = "" if prompt[-1].isspace() else " "
    return f"{prompt}{between}{row.texts('answers')[0]}\n\n"


def _question(name: str, row: Record, text: str, answer_tokens: int) -> Question:
    subset = SUBSETS[name]
    question = Question(
        text=text,
        references=row.texts("answers"),
        metric=subset.metric,
        max_tokens=answer_tokens,
        stop=subset.stop,
        # null where the subset has no classes.
        classes=row.texts("all_classes") if subset.metric == "first-line-classification" else (),
    )
    try:
        score(question.metric, "", question.references, question.classes)
    except ValueError as error:
        row.fail(f"'answers' do not suit {name}: {error}")
    return question


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
