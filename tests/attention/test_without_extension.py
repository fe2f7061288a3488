"""An installation without a compiler has no extension: plain torch computes, and rounds of eviction too."""

import subprocess
import sys
from pathlib import Path

from tests.tiny_llama import save_tiny_llama

BOTH = """
import os, sys, torch
sys.modules["winnow._native"] = None
from winnow import LLM
from winnow.attention import ReferenceBackend, open_backend
assert isinstance(open_backend("auto"), ReferenceBackend)
with LLM(kv_memory="32MiB", eviction="leverage", kv_budget=48) as llm:
    answer = llm.generate(["The cat sat on the mat. " * 20])[0].outputs[0]
assert answer.token_ids and answer.eviction.rounds > 0

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
from winnow.config import ModelConfig
from winnow.models import load_model
from winnow.models.fast import optimize
from winnow.models.fast.fused.layer import FusedLayer
optimize._passes_fit = lambda model: True  # as on a GPU
loaded = load_model(ModelConfig(sys.argv[1]))
assert not loaded.unfused and all(isinstance(layer, FusedLayer) for layer in loaded.model.model.layers)
"""


def test_an_answer_a_round_and_fused_layers_need_no_extension(tmp_path: Path) -> None:
    """A GPU's fused layers are compared with the model's own code at load."""
    model = save_tiny_llama(
        tmp_path, seed=0, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    done = subprocess.run([sys.executable, "-c", BOTH, model], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("CPU kernels are not in this installation") == 1
