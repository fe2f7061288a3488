"""Sums of keys' directions: what rounds keep of a sequence goes wherever its KVs go."""

import torch

from winnow.eviction import KeyDirections
from winnow.executor.key_directions import DirectionStates


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
