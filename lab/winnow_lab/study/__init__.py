"""A study is its cells, its measure and its words: flags, provenance, tables, pages and journals are here, once."""

from winnow_lab.study.options import (
    EngineFlags,
    EngineOptions,
    ModelOptions,
    PageOptions,
    RealModelOptions,
    StudyOptions,
    flag,
    parse,
    read_pairs,
)
from winnow_lab.study.study import Result, as_command, in_turn, perform, run_study

__all__ = [
    "EngineFlags",
    "EngineOptions",
    "ModelOptions",
    "PageOptions",
    "RealModelOptions",
    "Result",
    "StudyOptions",
    "as_command",
    "flag",
    "in_turn",
    "parse",
    "perform",
    "read_pairs",
    "run_study",
]
