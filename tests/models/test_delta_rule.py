"""One step of the gated delta rule where states lie, beside transformers' own."""

import pytest
import torch
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from winnow.models.delta_rule import StateRows, gated_delta_step, steps_in_place

SLOTS = [4, 0, 3]


def chance(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_a_step_equals_transformers_and_other_states_stay(key_heads: int, norm: bool) -> None:
    rows = chance(6, 4, 8, 12)
    before = rows.clone()
    query, key, value = chance(3, 1, key_heads, 8), chance(3, 1, key_heads, 8), chance(3, 1, 4, 12)
    g, beta = -chance(3, 1, 4).abs(), chance(3, 1, 4).sigmoid()
    expected, states = modeling.torch_recurrent_gated_delta_rule(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=rows[SLOTS],
        output_final_state=True,
        use_qk_l2norm_in_kernel=norm,
    )
    found, _ = gated_delta_step(
        StateRows(rows, SLOTS), query, key, value, g, beta, use_qk_l2norm_in_kernel=norm
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows[SLOTS], states, rtol=1e-5, atol=1e-5)
    others = [slot for slot in range(6) if slot not in SLOTS]
    assert torch.equal(rows[others], before[others])


def test_modules_without_the_rule_keep_their_own_forward() -> None:
    own = modeling.torch_recurrent_gated_delta_rule
    assert steps_in_place(nn.Linear) is None
    assert steps_in_place(modeling.Qwen3_5Attention) is None
    assert steps_in_place(modeling.Qwen3_5GatedDeltaNet) is not None
    assert modeling.torch_recurrent_gated_delta_rule is own, "transformers' module is as it was"
