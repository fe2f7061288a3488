"""A signal that is not in the package: one file, by its path, its module or its object."""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import VOCAB

from winnow import LLM, SamplingParams
from winnow.cli.main import _module, register_own_policies
from winnow.errors import UsageError
from winnow.eviction import PRESETS

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "own_signal.py"
PROMPT = random.Random(3).choices(range(3, VOCAB), k=120)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def kept(directory: Path, **options: Any) -> tuple[list[list[list[int]]], list[int]]:
    """Positions that stay after the round of a prompt, and the answer."""
    with LLM(directory, kv_memory="8MiB", block_size=4, compression=4.0, kv_floor=1, **options) as llm:
        llm.submit(PROMPT, GREEDY)
        rows: list[list[list[int]]] = []
        while llm.has_unfinished:
            outputs = llm.step()
            [*running] = llm._engine.scheduler.running
            if running and running[0].kv.last_round and not rows:
                rows = llm._engine._executor.kept_positions(running[0].kv.slot)
            llm.check_integrity()
        assert outputs[0].error is None and len(rows[0][0]) < 60
        return rows, outputs[0].outputs[0].token_ids


def test_what_it_sees_and_keeps_does_not_depend_on_chunks(directory: Path) -> None:
    mine = _module(EXAMPLE).Mine
    whole = kept(directory, eviction=mine(), prefill_chunk=None)
    assert kept(directory, eviction=mine, prefill_chunk=16) == whole
    assert kept(directory, eviction="knorm", prefill_chunk=None)[0] != whole[0]


def test_it_sees_every_query_of_the_context_once(directory: Path) -> None:
    module, seen = _module(EXAMPLE), dict[int, list[torch.Tensor]]()
    at, sums = module.QuerySum.at, list[torch.Tensor]()

    def watched(self: Any, layer: int, some: Any, q: torch.Tensor, *rest: Any) -> None:
        seen.setdefault(layer, []).append(q.clone())
        at(self, layer, some, q, *rest)
        sums[:] = [self.kept(some.slot)["0"]]

    module.QuerySum.at = watched
    kept(directory, eviction=module.Mine(), prefill_chunk=32)
    queries = torch.cat(seen[0])
    assert len(queries) == len(PROMPT) and len(seen[0]) > 3
    torch.testing.assert_close(sums[0], queries.double().sum(dim=0).float(), atol=1e-4, rtol=1e-4)


def test_it_is_named_by_path_or_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_signals.py").write_text(EXAMPLE.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    for text in (f"{EXAMPLE}:Mine", "my_signals:Mine"):
        monkeypatch.setitem(PRESETS, text, PRESETS["full"])
        register_own_policies(argparse.Namespace(eviction=text))
        assert type(PRESETS[text].policy.score).__name__ == "Mine"
    sys.modules.pop("my_signals", None)
    for text in ("my_signals_that_are_not:Mine", f"{EXAMPLE}:QuerySum", f"{EXAMPLE}:nothing"):
        with pytest.raises(UsageError, match="--eviction"):
            register_own_policies(argparse.Namespace(eviction=text))
