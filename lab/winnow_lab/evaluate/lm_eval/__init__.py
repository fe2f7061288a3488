"""Winnow under lm-evaluation-harness (EleutherAI): `import winnow_lab.evaluate.lm_eval` registers the model "winnow".

Needs the extra lm-eval.
"""

from importlib.util import find_spec

from winnow.errors import EvaluationError
from winnow.process.extras import install_hint

if find_spec("lm_eval") is None:
    raise EvaluationError(f"lm_eval is not installed: {install_hint('lm-eval', './lab')}")

from winnow_lab.evaluate.lm_eval.model import WinnowLM

__all__ = ["WinnowLM"]
