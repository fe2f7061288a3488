"""RULER (arXiv:2404.06654): what is the context size that a model can really use?"""

from winnow_lab.evaluate.tasks.ruler.task import RULER, RulerTask

__all__ = ["RULER", "RulerTask"]
