"""Fused layers and packed products give what transformers' own layers give, or stay out of the way."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, build, save
from safetensors.torch import load_file, save_file
from test_parity import GREEDY, PROMPTS
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

pytest.importorskip("winnow._native")
from winnow import LLM, SamplingParams, _native
from winnow.attention import AttentionSpec
from winnow.config import ModelConfig
from winnow.models.binding import ATTENTION_NAME
from winnow.models.fused.kernels import LayerKernels
from winnow.models.fused.layer import FusedLayer, FusedNorm
from winnow.models.fused.probe import record_calls, run_model
from winnow.models.geometry import probe_geometry
from winnow.models.loader import load_model
from winnow.models.memory import is_file_backed, release_pages, trim_heap
from winnow.models.optimize import optimize_model
from winnow.models.packed_embedding import PackedEmbedding
from winnow.models.packed_linear import (
    OneDnnLinear,
    PackedLinear,
    linear_maker,
    one_dnn_works,
    pack_linears,
    unpack_linears,
)
from winnow.models.residuals import decoder_layers
from winnow.native import native_kernels

FUSED = [
    "llama-gqa",
    "llama-mqa",
    "llama-mha",
    "mistral-window",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3",
]
MAX_POSITION = 512


class Step:
    """Attention of a token with itself, which is enough to tell layers apart."""

    def __init__(self, logits_indices: Tensor | None = None, watching: bool = False) -> None:
        self.logits_indices, self.watching = logits_indices, watching
        self.specs: list[AttentionSpec] = []
        self.hidden: list[Tensor] = []
        self.attended: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        assert layer == len(self.specs)
        self.specs.append(spec)
        return q * spec.scale + (k * v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)

    def enter_layer(self, hidden: Tensor) -> None:
        self.hidden.append(hidden.clone())

    def leave_attention(self, layer: int, out: Tensor) -> None:
        self.attended.append(out.clone())


def bound(architecture: str, dtype: torch.dtype) -> Any:
    model = build(ARCHITECTURES[architecture]).to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def optimized(model: Any) -> Any:
    optimize_model(model, probe_geometry(model), MAX_POSITION)
    return model


def layers_of(model: Any) -> list[nn.Module]:
    return list(decoder_layers(model, model.config.num_hidden_layers))


@pytest.fixture(params=[False, True], ids=["vector-units", "matrix-units"])
def matrix_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor has AMX; both kinds are tried on every processor, since oneDNN computes on all of them."""
    monkeypatch.setattr(_native, "has_matrix_units", lambda: request.param)
    return bool(request.param)


def is_one_dnns(dtype: torch.dtype, matrix_units: bool) -> bool:
    """Whether linear layers are expected to be oneDNN's, so that nothing is left for the kernels' own forms."""
    return dtype == torch.bfloat16 and matrix_units and one_dnn_works()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)], ids=str
)
def test_logits_stay(architecture: str, dtype: torch.dtype, tolerance: float, matrix_units: bool) -> None:
    if matrix_units and not is_one_dnns(dtype, matrix_units):
        pytest.skip("matrix units change nothing for this type")
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_stay(architecture: str, tmp_path: Path) -> None:
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
    for wanted in range(everything.shape[1]):
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


@pytest.mark.parametrize("architecture", ["llama-gqa", "qwen3", "gemma2"])
def test_a_watching_step_sees_the_same_hidden_states(architecture: str) -> None:
    from winnow.models.residuals import watch_residuals

    model = bound(architecture, torch.float32)
    watch_residuals(model, 3)
    plain = Step(watching=True)
    run_model(model, MAX_POSITION, plain)
    model = optimized(bound(architecture, torch.float32))
    watch_residuals(model, 3)
    fused = Step(logits_indices=torch.tensor([0]), watching=True)
    run_model(model, MAX_POSITION, fused, logits_index=0)
    assert len(fused.hidden) == len(fused.attended) == 3
    for mine, theirs in zip(fused.hidden + fused.attended, plain.hidden + plain.attended, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_prompt_logprobs_and_several_samples(tmp_path: Path) -> None:
    save(ARCHITECTURES["llama-gqa"], tmp_path)
    params = SamplingParams(
        n=3, temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    found = []
    for optimize in (False, True):
        with LLM(tmp_path, dtype="float32", kv_memory="4MiB", prefill_chunk=32, optimize=optimize) as llm:
            found.append(llm.generate(PROMPTS, params))
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


@pytest.fixture
def kernels() -> LayerKernels:
    return LayerKernels(native_kernels())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products(kernels: LayerKernels, dtype: torch.dtype, bias: bool) -> None:
    plain = nn.Linear(70, 130, bias=bias).to(dtype)
    x = torch.randn(2, 17, 70).to(dtype)
    packed = PackedLinear.pack(plain.weight, plain.bias, kernels)
    eps = 2 * torch.finfo(dtype).eps
    for rows in (x, x[:, :1], x.transpose(0, 1), x[..., :0, :]):
        found, expected = packed(rows), plain(rows)
        assert found.dtype == dtype and found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=eps, atol=8 * eps)
    with pytest.raises(TypeError, match="cannot multiply"):
        packed(x.double())


@pytest.mark.skipif(not one_dnn_works(), reason="torch packs no bfloat16 on this processor")
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 300])
def test_products_by_matrix_units(kernels: LayerKernels, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerKernels, "beside_matrix_units", True)
    assert linear_maker(kernels, torch.bfloat16) is OneDnnLinear
    plain = nn.Linear(70, 130).bfloat16()
    x = torch.randn(1, rows, 70).bfloat16()
    eps = 2 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(OneDnnLinear(plain.weight, plain.bias)(x), plain(x), rtol=eps, atol=8 * eps)
    assert type(linear_maker(kernels, torch.float32)(plain.weight.float(), None)) is PackedLinear


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, PackedLinear), (torch.float16, nn.Linear)], ids=str
)
def test_an_odd_number_of_inputs(kernels: LayerKernels, dtype: torch.dtype, kind: type) -> None:
    """Pairs of inputs are packed in 16 bits, and one would be left over."""
    plain = nn.Linear(7, 5).to(dtype)
    made = linear_maker(kernels, dtype)(plain.weight, plain.bias)
    assert type(made) is kind
    x = torch.randn(3, 7).to(dtype)
    torch.testing.assert_close(made(x), plain(x), rtol=1e-3, atol=1e-3)


def test_only_plain_linear_layers_are_packed(kernels: LayerKernels) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Twice(4, 4)))
    replaced = pack_linears(module, linear_maker(kernels, torch.float32))
    assert type(module[0]) is PackedLinear and type(module[1][0]) is Twice
    unpack_linears(replaced)
    assert type(module[0]) is nn.Linear


def tied(**changes: Any) -> Any:
    config = LlamaConfig(**ARCHITECTURES["llama-gqa"].to_dict() | {"tie_word_embeddings": True} | changes)
    model = build(config)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@pytest.mark.parametrize("vocab_size", [VOCAB, 131], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_embedding_reads_its_rows_from_a_tied_head(
    dtype: torch.dtype, vocab_size: int, matrix_units: bool
) -> None:
    model = tied(vocab_size=vocab_size).to(dtype)
    dense = model.model.embed_tokens.weight.detach().clone()
    optimized(model)
    if is_one_dnns(dtype, matrix_units):
        # No rows can be read out of its packed form, and a second copy of the weight is not worth its memory.
        assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, dense)
        return
    assert type(model.lm_head) is PackedLinear and type(model.model.embed_tokens) is PackedEmbedding
    assert model.model.embed_tokens.packed.data_ptr() == model.lm_head.packed.packed.data_ptr()
    assert model.dtype == dtype and model.device.type == "cpu"
    shuffled = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    for tokens in (torch.arange(vocab_size)[None], shuffled, torch.tensor([], dtype=torch.int64)):
        rows = model.model.embed_tokens(tokens)
        assert rows.is_contiguous() and torch.equal(rows, dense[tokens])
        assert torch.equal(rows, model.model.embed_tokens(tokens.int()))
    for outside in (-1, vocab_size):
        with pytest.raises(IndexError, match=f"between 0 and {vocab_size - 1}, got {outside}"):
            model.model.embed_tokens(torch.tensor([[0, outside]]))


def test_an_embedding_stays_whose_weight_the_model_reads_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaModel.forward

    def reading(self: LlamaModel, *args: Any, **kwargs: Any) -> Any:
        assert self.embed_tokens.weight.ndim == 2
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", reading)
    model = optimized(tied())
    assert type(model.model.embed_tokens) is nn.Embedding
    # No file holds its rows, so the head keeps the one copy there is.
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_embedding_stays_that_is_more_than_its_rows() -> None:
    class Doubled(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return 2 * super().forward(tokens)

    model = tied()
    weight = model.lm_head.weight
    embedding = Doubled(*weight.shape)
    embedding.weight = weight
    model.set_input_embeddings(embedding)
    expected = run_model(model, MAX_POSITION, Step())
    optimized(model)
    assert model.model.embed_tokens is embedding and model.lm_head.weight is weight
    torch.testing.assert_close(run_model(model, MAX_POSITION, Step()), expected, rtol=1e-4, atol=1e-5)


def test_rows_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = PackedEmbedding.forward
    monkeypatch.setattr(PackedEmbedding, "forward", lambda self, tokens: lookup(self, tokens).flip(-1))
    model = optimized(tied())
    assert type(model.model.embed_tokens) is nn.Embedding
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_head_of_its_own_leaves_the_embedding() -> None:
    model = optimized(bound("llama-gqa", torch.float32))
    assert type(model.lm_head) is PackedLinear and type(model.model.embed_tokens) is nn.Embedding


def test_a_tied_head_without_readable_rows_is_packed_where_the_embedding_stays_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnow.models.optimize._share_rows", lambda *_: False)
    tied().save_pretrained(tmp_path)
    plain = load_model(ModelConfig(tmp_path, optimize=False)).model
    packed = load_model(ModelConfig(tmp_path)).model
    assert type(packed.lm_head) is PackedLinear
    assert is_file_backed(packed.model.embed_tokens.weight)
    assert torch.equal(packed.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    hidden = torch.randn(5, plain.config.hidden_size)
    torch.testing.assert_close(packed.lm_head(hidden), plain.lm_head(hidden), rtol=1e-5, atol=1e-5)
    # In another format than the file's, or without a file, the embedding is in memory already.
    for other in (ModelConfig(tmp_path, dtype="bfloat16"), ModelConfig(tmp_path, load_format="dummy")):
        assert type(load_model(other).model.lm_head) is nn.Linear


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_tied_model_is_loaded_with_one_copy(tmp_path: Path, load_format: str) -> None:
    tied().save_pretrained(tmp_path)
    model = load_model(ModelConfig(tmp_path, load_format=load_format)).model
    assert type(model.lm_head) is PackedLinear and type(model.model.embed_tokens) is PackedEmbedding


def test_pages_let_go_come_back_from_their_file(tmp_path: Path) -> None:
    values = {"a": torch.randn(300, 100), "b": torch.randn(7)}
    save_file(values, tmp_path / "weights.safetensors")
    mapped = load_file(tmp_path / "weights.safetensors")
    own = {name: value.clone() for name, value in values.items()}
    release_pages([*mapped.values(), *own.values(), torch.empty(0)])
    trim_heap()
    for name, value in values.items():
        assert torch.equal(mapped[name], value) and torch.equal(own[name], value)


def resident_of_files() -> int:
    """Bytes of files that this process has mapped and in memory; Linux counts those of tmpfs apart."""
    lines = Path("/proc/self/status").read_text().splitlines()
    shown = dict(line.split(":", maxsplit=1) for line in lines)
    return sum(int(shown[kind].split()[0]) for kind in ("RssFile", "RssShmem")) * 2**10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_pages_that_others_map_too_are_let_go(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    values = {"a": torch.randn(4096, 1024)}
    save_file(values, file)
    holding = (
        f"import mmap; f = open({str(file)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); "
    )
    holding += "sum(m[:: mmap.PAGESIZE]); print('held', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", holding], text=True, **pipes) as other:
        assert other.stdout.readline() == "held\n"
        mapped = load_file(file)
        assert torch.equal(mapped["a"], values["a"])
        before = resident_of_files()
        release_pages(mapped.values())
        assert before - resident_of_files() > 0.9 * values["a"].nbytes
        assert torch.equal(mapped["a"], values["a"])
        other.communicate("\n")


def test_pages_that_were_written_keep_what_was_written(tmp_path: Path) -> None:
    values = {"a": torch.randn(4096, 64), "b": torch.randn(4096, 64)}
    save_file(values, tmp_path / "weights.safetensors")
    mapped = load_file(tmp_path / "weights.safetensors")
    mapped["a"][2000] = 7
    release_pages(mapped.values())
    values["a"][2000] = 7
    for name, value in values.items():
        assert torch.equal(mapped[name], value)


@pytest.mark.parametrize("architecture", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_as_two_calls_gives_the_bits_of_its_parts(
    architecture: str, dtype: torch.dtype, matrix_units: bool
) -> None:
    model = optimized(bound(architecture, dtype))
    if is_one_dnns(dtype, matrix_units):
        for layer in layers_of(model):
            products = (layer.qkv, layer.output, layer.gate_up, layer.down)
            assert all(type(product) is OneDnnLinear for product in products) and layer._native is None
        return
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
