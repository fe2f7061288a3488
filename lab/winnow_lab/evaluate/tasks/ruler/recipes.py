"""The 13 tasks of RULER (arXiv:2404.06654, table 2 of the paper and `synthetic.yaml` of its code), by name."""

from collections.abc import Mapping
from types import MappingProxyType

from winnow_lab.evaluate.tasks.ruler.common_words import CommonWords
from winnow_lab.evaluate.tasks.ruler.frequent_words import FrequentWords
from winnow_lab.evaluate.tasks.ruler.niah import Niah
from winnow_lab.evaluate.tasks.ruler.qa import DocumentQA
from winnow_lab.evaluate.tasks.ruler.recipe import Recipe
from winnow_lab.evaluate.tasks.ruler.tracking import Tracking

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "niah_single_1": Niah("noise"),
        "niah_single_2": Niah("essay"),
        "niah_single_3": Niah("essay", value_kind="uuids"),
        "niah_multikey_1": Niah("essay", keys=4),
        "niah_multikey_2": Niah("needles"),
        "niah_multikey_3": Niah("needles", key_kind="uuids", value_kind="uuids"),
        "niah_multivalue": Niah("essay", values=4),
        "niah_multiquery": Niah("essay", keys=4, asked=4),
        "vt": Tracking(),
        "cwe": CommonWords(),
        "fwe": FrequentWords(),
        "qa_1": DocumentQA("squad"),
        "qa_2": DocumentQA("hotpotqa"),
    }
)
