"""The compact Llama of the training scripts computes what transformers' LlamaForCausalLM computes."""

import importlib.util
import sys
from types import ModuleType

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from winnow_lab.checkout import ROOT


def load(name: str) -> ModuleType:
    """A script of training/, under a name of its own."""
    path = ROOT / "training" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"training_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_logits_are_those_of_transformers() -> None:
    torch.manual_seed(3)
    module = load("model")
    shape = module.LlamaShape(vocab_size=97, hidden_size=32, intermediate_size=48, layers=2, max_positions=64)
    ours = module.TrainingLlama(shape, torch.float32)
    for norm in (ours.norm, *(block.input_norm for block in ours.blocks)):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    theirs = LlamaForCausalLM(LlamaConfig(**shape.hugging_face_config(1, 2, 0, "float32"))).eval()
    unknown = theirs.load_state_dict(ours.to_hugging_face(torch.float32), strict=False)
    assert unknown.missing_keys == ["lm_head.weight"]
    assert not unknown.unexpected_keys
    theirs.tie_weights()

    tokens = torch.randint(0, 97, (3, 40))
    positions = torch.arange(40).expand(3, 40)
    with torch.no_grad():
        expected = theirs(tokens).logits.flatten(0, 1)
        torch.testing.assert_close(ours(tokens, positions, torch.arange(120)), expected, rtol=1e-5, atol=1e-5)
        chosen = torch.tensor([5, 44, 119])
        torch.testing.assert_close(ours(tokens, positions, chosen), expected[chosen], rtol=1e-5, atol=1e-5)
