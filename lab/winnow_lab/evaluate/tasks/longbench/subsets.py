"""The English subsets of LongBench, and how each is asked and scored."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Subset:
    """One subset; its prompt and the length of its answers stand in files.

    Attributes:
        metric: a key of `winnow.metrics.METRICS`.
        chat: whether the prompt goes through the model's chat template. Examples and code to be continued do not.
        stop: strings that end the answer.
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
