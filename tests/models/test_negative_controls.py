"""The parity tests prove something: change what attention is asked for, and tokens change."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, save
from test_parity import GREEDY, MAX_TOKENS, generate_alone, prompt
from torch import Tensor

from winnow import LLM
from winnow.attention import AttentionSpec
from winnow.attention.reference import ReferenceStep
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import load_model

# Off by one: sliding windows go by stored positions, so even that must show.
CHANGES: dict[str, Callable[[AttentionSpec], AttentionSpec]] = {
    "no softcap": lambda spec: replace(spec, softcap=None),
    "no window": lambda spec: replace(spec, window=None),
    "shorter window": lambda spec: replace(spec, window=spec.window and spec.window - 1),
    "longer window": lambda spec: replace(spec, window=spec.window and spec.window + 1),
    "no sinks": lambda spec: replace(spec, sinks=None),
    "other scale": lambda spec: replace(spec, scale=1.1 * spec.scale),
    "nothing": lambda spec: spec,
}
PROMPTS = [prompt(33), prompt(70)]


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("gemma2", "no softcap"),
        ("gemma2", "no window"),
        ("mistral-window", "no window"),
        ("mistral-window", "shorter window"),
        ("mistral-window", "longer window"),
        ("llama-gqa", "other scale"),
        ("gpt-oss", "no sinks"),
        ("gemma2", "nothing"),
    ],
)
def test_a_change_is_noticed(
    architecture: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(ARCHITECTURES[architecture], tmp_path)
    expected = [generate_alone(model, tokens, MAX_TOKENS) for tokens in PROMPTS]
    attend = ReferenceStep.attend

    def changed(self: ReferenceStep, *args: Any) -> Tensor:
        return attend(self, *[CHANGES[change](a) if isinstance(a, AttentionSpec) else a for a in args])

    monkeypatch.setattr(ReferenceStep, "attend", changed)
    if change != "nothing":
        with pytest.raises(UnsupportedModelError, match="Winnow computes something else than its own code"):
            load_model(ModelConfig(tmp_path, attention_backend="reference"))
    options = {"attention_backend": "reference", "verify_model": False}
    with LLM(tmp_path, kv_memory="4MiB", **options) as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    assert (found == expected) == (change == "nothing")
