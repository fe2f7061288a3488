"""Winnow under lm-evaluation-harness (EleutherAI): `import winnow.evaluate.lm_eval` registers the model "winnow".

Needs the extra: pip install 'winnow-llm[lm-eval]'.
"""

from importlib.util import find_spec

from winnow.errors import EvaluationError

if find_spec("lm_eval") is None:
    raise EvaluationError("lm_eval is not installed: pip install 'winnow-llm[lm-eval]'")

from winnow.evaluate.lm_eval.model import WinnowLM

__all__ = ["WinnowLM"]
