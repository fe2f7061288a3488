"""`winnow check` tells how far a model is from its own code."""

from pathlib import Path

import pytest
from transformers import Gemma2Config, GPT2Config, PhimoeConfig

from winnow.cli.main import main

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def test_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    for words in ("LlamaForCausalLM", "bfloat16", "4096 tokens", "largest difference", "served"):
        assert words in shown


def test_windows_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Gemma2Config(**SIZES, head_dim=16, sliding_window=24).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--load-format", "dummy"]) == 0
    shown = capsys.readouterr().out
    assert "24 (1 layers), none (1 layers)" in shown and "254 tokens back" in shown


def test_layers_that_are_not_fused_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("winnow._native")
    GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=1).save_pretrained(
        tmp_path
    )
    assert main(["check", str(tmp_path), "--load-format", "dummy"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "left to its own code layers 0, 1: its parts are not those of Llama's layers" in shown


def test_a_model_that_differs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PhimoeConfig(**SIZES, sliding_window=100, num_local_experts=2).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--load-format", "dummy"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("winnow: error: model: PhimoeForCausalLM is not supported: layer 0 ")


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere"]) == 2
    assert "model must be a directory" in capsys.readouterr().err
