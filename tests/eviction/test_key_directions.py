"""Sums of keys' directions: what rounds keep of a sequence goes wherever its KVs go."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, SamplingParams
from winnow.eviction import PRESETS, KeyDirections, When
from winnow.executor.signals import DirectionStates


def test_sums_follow_forks_copies_and_files() -> None:
    states, layers = DirectionStates(torch.device("cpu")), (1, 4)
    zero = states.of(layers, (7, 2), (3, 5))
    assert zero.sums.shape == (2, 2, 3, 5) and not zero.sums.any() and zero.counted.tolist() == [0, 0]
    sums = torch.randn(2, 1, 3, 5)
    states.keep(layers, (7,), KeyDirections(sums, torch.tensor([48], dtype=torch.int32)))
    states.fork(7, 2)
    saved = states.save(7)
    assert saved is not None and states.nbytes(7) == 2 * (3 * 5 * 4 + 4)
    assert states.save(7, (0, 16)) is None, "blocks that no round has changed hold all of their keys"
    states.close(7)
    assert not states.of(layers, (7,), (3, 5)).sums.any() and states.save(7) is None
    states.load(0, states.from_arrays(states.to_arrays(saved)))
    for slot in (2, 0):
        found = states.of(layers, (slot,), (3, 5))
        assert torch.equal(found.sums, sums) and found.counted.tolist() == [48]
    found.sums.add_(1.0)
    assert torch.equal(states.of(layers, (0,), (3, 5)).sums, sums), "a round works on copies"


def test_each_sample_keeps_what_it_would_keep_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples share the round of their prompt; later ones of each count the keys that it took. Without kernels too."""
    rng = random.Random(0)
    prompt, *answers = (rng.choices(range(3, VOCAB), k=length) for length in (120, 60, 60))
    policy = replace(PRESETS["winnow-keys"].policy, when=When(after_prefill=True, decode_every=16))
    with LLM(save_tiny_llama(tmp_path / "model", 3), kv_memory="8MiB", block_size=4, kv_floor=1) as llm:

        def kept(*forced: list[int]) -> list[Any]:
            llm.reset_prefix_cache()
            params = SamplingParams(
                n=len(forced),
                max_tokens=60,
                forced_tokens=list(forced),
                ignore_eos=True,
                eviction=policy,
                kv_budget=24,
            )
            [output] = llm.generate([prompt], params)
            return [each.eviction.kept for each in output.outputs if each.eviction is not None]

        together = kept(*answers)
        assert together == [*kept(answers[0]), *kept(answers[1])] and together[0] != together[1]
        monkeypatch.setattr("winnow.eviction.kernels.native_kernels", lambda: None)
        monkeypatch.setattr("winnow.eviction.scores.keys.key_difference_kernel", lambda rows: None)
        assert kept(*answers) == together
