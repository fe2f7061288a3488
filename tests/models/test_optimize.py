"""Fused layers and packed products give what transformers' own layers give, or stay out of the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, build, save
from hybrids import HYBRIDS
from test_parity import GREEDY, PROMPTS
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMLP
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

pytest.importorskip("winnow._native")
from optimizing import FUSED, MAX_POSITION, Step, bound, layers_of, optimized

from winnow import LLM, SamplingParams
from winnow.attention import AttentionSpec
from winnow.config import ModelConfig
from winnow.models import load_model
from winnow.models.bind.binding import ATTENTION_NAME
from winnow.models.bind.geometry_probe import probe_geometry
from winnow.models.fast.fused.build import record_calls, run_model
from winnow.models.fast.fused.layer import FusedFeedForward, FusedLayer, FusedNorm
from winnow.models.fast.optimize import optimize_model
from winnow.models.fast.packed_linear import PackedLinear
from winnow.models.model.geometry import decoder_layers

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("architecture", "dtype", "tolerance"),
    [
        *((name, torch.float32, 1e-5) for name in ARCHITECTURES),
        *((name, torch.bfloat16, 5e-2) for name in ("qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gpt-oss")),
        *((name, torch.float16, 1e-2) for name in ("llama-gqa", "gemma3")),
    ],
    ids=str,
)
def test_logits_stay(architecture: str, dtype: torch.dtype, tolerance: float) -> None:
    model = bound(architecture, dtype)
    before, plain_step, step = None, Step(), Step()
    before = run_model(model, MAX_POSITION, plain_step)
    after = run_model(optimized(model), MAX_POSITION, step)
    assert all(isinstance(layer, FusedLayer) == (architecture in FUSED) for layer in layers_of(model))
    assert isinstance(getattr(model.base_model, "norm", None), FusedNorm) == (architecture in FUSED)
    assert float((after - before).norm()) <= tolerance * float(before.norm())
    for mine, theirs in zip(step.specs, plain_step.specs, strict=True):
        assert (mine.scale, mine.window, mine.softcap) == (theirs.scale, theirs.window, theirs.softcap)
        assert (mine.sinks is None) == (theirs.sinks is None)


@pytest.mark.parametrize("architecture", ["gemma3", "gpt-oss", "gpt2"])
def test_greedy_tokens_stay(architecture: str, tmp_path: Path) -> None:
    """Of fused layers, of parts, and of products alone; tokens of all fast forms are held against transformers'."""
    save(ARCHITECTURES[architecture], tmp_path)
    found = []
    for optimize in (False, True):
        with LLM(tmp_path, dtype="float32", kv_memory="4MiB", optimize=optimize) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)])
    assert found[0] == found[1]


def unnormed_output(self: LlamaDecoderLayer, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return LlamaDecoderLayer.forward(self, hidden_states, **kwargs) * 1.01


def far_positions(self: LlamaDecoderLayer, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    factor = 1 + (kwargs["position_ids"] > 200)[..., None] * 0.01
    return LlamaDecoderLayer.forward(self, hidden_states * factor.to(hidden_states.dtype), **kwargs)


def other_scale(self: LlamaDecoderLayer, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    step = kwargs["winnow_step"]

    class Scaled:
        def enter(self, module: nn.Module) -> None:
            step.enter(module)  # of a geometry's probe

        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            return step.attend(layer, q, k * 1.01, v, spec)

    return LlamaDecoderLayer.forward(self, hidden_states, **kwargs | {"winnow_step": Scaled()})


def own_format(self: LlamaDecoderLayer, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Fails in any number format but the model's."""
    scale = torch.eye(hidden_states.shape[-1], dtype=self.own_dtype) * 1.01
    return LlamaDecoderLayer.forward(self, hidden_states, **kwargs) @ scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forward", [unnormed_output, far_positions, other_scale, own_format, None])
def test_a_layer_that_differs_is_left_alone(
    dtype: torch.dtype, forward: Callable[..., Tensor] | None
) -> None:
    """One per cent is less than what bfloat16 rounds in a layer; the comparison in float32 sees it."""
    model = bound("llama-gqa", dtype)
    layers = layers_of(model)
    if forward is not None:
        layers[1].__class__ = type("Other", (LlamaDecoderLayer,), {"forward": forward, "own_dtype": dtype})
    before = run_model(model, MAX_POSITION, Step())
    kinds = [isinstance(layer, FusedLayer) for layer in layers_of(optimized(model))]
    assert kinds == [True, forward is None, True]
    if forward is not None:
        assert layers_of(model)[1] is layers[1]
    after = run_model(model, MAX_POSITION, Step())
    assert float((after - before).norm()) <= (1e-5 if dtype == torch.float32 else 5e-2) * float(before.norm())


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_parts_of_a_layer_of_another_kind(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What computes something else under the same names stays, and the layer's linear parts are packed."""
    own = GraniteMoeHybridMLP.forward
    monkeypatch.setattr(GraniteMoeHybridMLP, "forward", lambda self, x: own(self, x) * factor)
    save(HYBRIDS["granite-4"], tmp_path)
    loaded: Any = load_model(ModelConfig(tmp_path, dtype="float32", device="cpu"))
    layer = loaded.model.model.layers[0]
    assert isinstance(layer.shared_mlp, FusedFeedForward) == (factor == 1.0)
    assert isinstance(layer.input_layernorm, FusedNorm) == (factor == 1.0)
    assert isinstance(layer.mamba.in_proj, PackedLinear)
    assert type(layer.mamba.norm).__name__ == "GraniteMoeHybridRMSNormGated", "it takes gates, too"


def test_a_layer_that_reads_a_weight_itself_keeps_its_linear_parts() -> None:
    def forward(self: LlamaDecoderLayer, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return LlamaDecoderLayer.forward(self, hidden_states, **kwargs) * self.mlp.up_proj.weight.norm()

    model = bound("llama-gqa", torch.float32)
    layer = layers_of(model)[1]
    layer.__class__ = type("Other", (LlamaDecoderLayer,), {"forward": forward})
    optimized(model)
    assert type(layer.mlp.up_proj) is nn.Linear
    run_model(model, MAX_POSITION, Step())


def test_another_activation_is_not_taken_for_silu() -> None:
    config = LlamaConfig(**ARCHITECTURES["llama-gqa"].to_dict() | {"hidden_act": "gelu"})
    model = build(config)
    model.set_attn_implementation(ATTENTION_NAME)
    assert not any(isinstance(layer, FusedLayer) for layer in layers_of(optimized(model)))


@pytest.mark.parametrize("architecture", FUSED)
def test_the_last_layer_computes_only_what_is_wanted(architecture: str) -> None:
    model = optimized(bound(architecture, torch.float32))
    assert [layer.last_layer_only_wanted for layer in layers_of(model)] == [False, False, True]
    everything = run_model(model, MAX_POSITION, Step())
    for wanted in (0, everything.shape[1] // 2, everything.shape[1] - 1):
        found = run_model(model, MAX_POSITION, Step(torch.tensor([wanted])), logits_index=wanted)
        torch.testing.assert_close(found[0, 0], everything[0, wanted], rtol=1e-5, atol=1e-5)


def test_what_comes_after_the_layers_may_need_every_token() -> None:
    """A model whose head looks at all hidden states: the last layer must not leave any out."""
    model = bound("llama-gqa", torch.float32)
    norm = model.model.norm
    model.model.norm = nn.Sequential(norm, _Mean())
    assert not any(layer.last_layer_only_wanted for layer in layers_of(optimized(model)))


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(dim=1, keepdim=True)


def test_prompt_logprobs_and_several_samples(tmp_path: Path) -> None:
    save(ARCHITECTURES["llama-gqa"], tmp_path)
    params = SamplingParams(
        n=3, temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    found = []
    for optimize in (False, True):
        with LLM(tmp_path, dtype="float32", kv_memory="4MiB", prefill_chunk=32, optimize=optimize) as llm:
            found.append(llm.generate(PROMPTS[::2], params))
    for plain, fused in zip(*found, strict=True):
        assert [c.token_ids for c in plain.outputs] == [c.token_ids for c in fused.outputs]
        values = [
            [
                entry.logprob
                for dicts in (output.prompt_logprobs[1:], *(c.logprobs for c in output.outputs))
                for tokens in dicts
                for entry in tokens.values()
            ]
            for output in (plain, fused)
        ]
        torch.testing.assert_close(torch.tensor(values[0]), torch.tensor(values[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((name, torch.float32) for name in FUSED[3:]),
        *((name, torch.bfloat16) for name in ("qwen2", "gemma3")),
    ],
    ids=str,
)
def test_a_layer_as_two_calls_gives_the_bits_of_its_parts(architecture: str, dtype: torch.dtype) -> None:
    model = optimized(bound(architecture, dtype))
    whole = run_model(model, MAX_POSITION, Step())
    for layer in layers_of(model):
        assert layer._native is not None
        layer._native = None
    assert torch.equal(run_model(model, MAX_POSITION, Step()), whole)


def test_calls_are_recorded_in_order() -> None:
    model = bound("mistral-window", torch.float32)
    calls = record_calls(model, decoder_layers(model, 3), MAX_POSITION)
    assert len(calls) == 3 and all(call.rotation is not None for call in calls)
    assert int(calls[0].kwargs["position_ids"].max()) == MAX_POSITION - 1
    assert VOCAB > 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_norm_weights_and_a_large_residual_stream(dtype: torch.dtype) -> None:
    """As in Gemma-3-270M: beside a weight of 150, the one that is added to it is less than bfloat16 rounds."""
    model = bound("gemma3", dtype)
    with torch.no_grad():
        for layer in layers_of(model):
            for norm in (layer.input_layernorm, layer.pre_feedforward_layernorm):
                # Of few features the one is all the weight, and products make much of them.
                norm.weight.copy_(torch.linspace(20, 150, len(norm.weight)))
                norm.weight[::8] = 0.01
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.mul_(0.02)
                linear.weight[:, ::8] *= 100
            for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
                norm.weight.copy_(torch.linspace(20, 150, len(norm.weight)))
        model.get_input_embeddings().weight.mul_(30)
    before, hidden = run_model(model, MAX_POSITION, Step()), list[Tensor]()
    _, unfused = optimize_model(model, probe_geometry(model), MAX_POSITION)
    assert unfused == {}
    layers_of(model)[-1].register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    after = run_model(model, MAX_POSITION, Step())
    assert float(hidden[-1].abs().max()) > 500
    assert float((after - before).norm()) <= (5e-2 if dtype == torch.bfloat16 else 1e-2) * float(
        before.norm()
    )


def test_a_layer_is_tried_on_what_the_model_gives_it() -> None:
    """What it does to large numbers alone, no random hidden states of size one can tell."""

    def forward(self: LlamaDecoderLayer, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return LlamaDecoderLayer.forward(self, hidden_states, **kwargs).clamp(-100, 100)

    model = bound("llama-gqa", torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(200)
    layers = layers_of(model)
    layers[1].__class__ = type("Clamped", (LlamaDecoderLayer,), {"forward": forward})
    decoder, unfused = optimize_model(model, probe_geometry(model), MAX_POSITION)
    assert [isinstance(layer, FusedLayer) for layer in layers_of(model)] == [True, False, True]
    assert unfused == {1: "another output on the model's own"} and decoder is None
