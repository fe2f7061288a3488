"""An installation without a compiler has no extension: plain torch computes, and rounds of eviction too."""

import subprocess
import sys

ANSWER = """
import sys
sys.modules["winnow._native"] = None
from winnow import LLM
from winnow.attention import ReferenceBackend, open_backend
assert isinstance(open_backend("auto"), ReferenceBackend)
with LLM(kv_memory="32MiB", eviction="leverage", kv_budget=48) as llm:
    answer = llm.generate(["The cat sat on the mat. " * 20])[0].outputs[0]
assert answer.token_ids and answer.eviction.rounds > 0
"""


def test_an_answer_and_a_round_need_no_extension() -> None:
    done = subprocess.run([sys.executable, "-c", ANSWER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kernels are not in this installation" in done.stderr
