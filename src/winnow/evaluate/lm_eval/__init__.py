"""Winnow under lm-evaluation-harness (EleutherAI): `import winnow.evaluate.lm_eval` registers the model "winnow".

Needs the extra: pip install 'winnow-llm[lm-eval]'.
"""

from winnow.evaluate.lm_eval.require import require_lm_eval

require_lm_eval()

from winnow.evaluate.lm_eval.model import WinnowLM  # noqa: E402

__all__ = ["WinnowLM"]
