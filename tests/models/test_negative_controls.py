"""The parity tests prove something: leave a feature out, and tokens change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, save
from test_parity import GREEDY, MAX_TOKENS, PROMPTS, generate_alone

from winnow import LLM
from winnow.attention import ReferenceBackend


@pytest.mark.parametrize(
    ("architecture", "argument"), [("gemma2", "softcap"), ("gemma2", "window"), ("mistral-window", "window")]
)
def test_a_dropped_argument_is_noticed(
    architecture: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(ARCHITECTURES[architecture], tmp_path)
    expected = [generate_alone(model, tokens, MAX_TOKENS) for tokens in PROMPTS[-2:]]
    attend = ReferenceBackend.attend

    def without(self: ReferenceBackend, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert kwargs[argument] is not None or architecture == "gemma2", "the model never asked for it"
        return attend(self, *args, **kwargs | {argument: None})

    monkeypatch.setattr(ReferenceBackend, "attend", without)
    with LLM(tmp_path, kv_memory="4MiB") as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[-2:], GREEDY)]
    assert found != expected


def test_a_shifted_position_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding windows go by stored positions; off by one must show."""
    model = save(ARCHITECTURES["mistral-window"], tmp_path)
    expected = [generate_alone(model, tokens, MAX_TOKENS) for tokens in PROMPTS[-2:]]
    attend = ReferenceBackend.attend

    def off_by_one(self: ReferenceBackend, *args: Any, **kwargs: Any) -> torch.Tensor:
        return attend(self, *args, **kwargs | {"window": kwargs["window"] - 1})

    monkeypatch.setattr(ReferenceBackend, "attend", off_by_one)
    with LLM(tmp_path, kv_memory="4MiB") as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[-2:], GREEDY)]
    assert found != expected
