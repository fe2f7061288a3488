"""Tasks that ask for something hidden in real prose: for training the demo model, and for measuring with it."""

from winnow_lab.evaluate.demo_tasks.categories import CATEGORIES, Category, make_document, make_sample
from winnow_lab.evaluate.demo_tasks.haystack import CountTokens, Haystack
from winnow_lab.evaluate.demo_tasks.sample import DemoDocument, DemoSample, Question, question_suffix

__all__ = [
    "CATEGORIES",
    "Category",
    "CountTokens",
    "DemoDocument",
    "DemoSample",
    "Haystack",
    "Question",
    "make_document",
    "make_sample",
    "question_suffix",
]
