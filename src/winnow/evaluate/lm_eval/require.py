"""The optional library, or a clear word that it is missing."""

from importlib.util import find_spec

from winnow.errors import EvaluationError


def require_lm_eval() -> None:
    """Raise EvaluationError where lm_eval is not installed; names the extra that brings it."""
    if find_spec("lm_eval") is None:
        raise EvaluationError("lm_eval is not installed: pip install 'winnow-llm[lm-eval]'")
