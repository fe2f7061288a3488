"""Linear layers by humming, whose kernels need a GPU: what it is handed, and on a CPU a stand-in that multiplies it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.tiny_llama import save_tiny_llama
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")
from optimizing import MAX_POSITION, Step, bound, layers_of

import winnow_humming as library_weights
from winnow import LLM, SamplingParams
from winnow.config import EngineConfig, ModelConfig
from winnow.errors import ConfigError
from winnow.executor.build import _identity
from winnow.models.bind.geometry_probe import probe_geometry
from winnow.models.fast import optimize
from winnow.models.fast.fused import build
from winnow.models.fast.fused.build import run_model
from winnow.models.fast.fused.layer import FusedLayer
from winnow.models.load import checkpoint
from winnow.models.load.quantized import Codes, FloatCodes
from winnow.models.model.blocks import Blocks, quantize
from winnow.models.model.experts import linear_of
from winnow_humming import HummingLinear, LibraryWeights, humming_tensors

CUDA = torch.device("cuda")
CHANCE = torch.Generator().manual_seed(0)


def integers(words: Tensor, bits: int) -> Tensor:
    """Codes of 32-bit words [rows, n], the lowest first: float32 [rows, n * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(1).float()


def numbers(form: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """What humming's tensors stand for, by its documentation, in float32."""
    if form["dtype"] == "float8e4m3":
        codes = tensors["weight"].view(torch.float8_e4m3fn).float()
    else:
        bits = int(form["dtype"][-1])
        codes = integers(tensors["weight"], bits)
        zero = torch.tensor([[float(1 << bits - 1)]])
        if form.get("has_zero_point"):
            zero = integers(tensors["zero_point"].T.contiguous(), bits).T.repeat_interleave(
                form["group_size"], 1
            )
        codes = codes - zero
    scale = tensors["weight_scale"].float().repeat_interleave(form.get("group_size_n", 1), 0)
    return codes * scale.repeat_interleave(form.get("group_size", codes.shape[1]), 1)


class Layer(nn.Module):
    """Stands for humming's layer where there is no GPU. Its own quantization is to the nearest of 15 numbers."""

    made: ClassVar[list["Layer"]] = []

    def __init__(self, shape_n: int, shape_k: int, form: Any, activations: Any, **options: Any) -> None:
        super().__init__()
        self.shape, self.form, self.activations, self.options = (shape_n, shape_k), form, activations, options
        self.tensors: dict[str, Tensor] = {}
        self.made.append(self)

    def load_from_unquantized(self, weight: Tensor) -> None:
        step = weight.float().abs().amax(1, keepdim=True) / 7
        self.tensors["rounded"] = (weight / step).round() * step

    def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.tensors |= tensors

    def transform(self) -> None:
        weight = self.tensors["rounded"] if "rounded" in self.tensors else numbers(self.form, self.tensors)
        assert weight.shape == self.shape and ("bias" in self.tensors) == self.options["has_bias"]
        self.weight = weight.to(self.options["torch_dtype"])

    def forward(self, x: Tensor) -> Tensor:
        assert x.ndim == 2
        return F.linear(x, self.weight, self.tensors.get("bias"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[Layer]:
    """Layers of humming, in models that are optimized as on a GPU."""
    Layer.made.clear()
    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=Layer))
    monkeypatch.setattr(library_weights, "_capability", lambda device: (8, 9))
    monkeypatch.setattr(library_weights, "_PANEL", (1, 1))  # models are tiny
    monkeypatch.setattr(build, "_POSITIONS", (7,))  # the interpreter takes long for each token
    monkeypatch.setattr(optimize, "_passes_fit", lambda model: True)
    monkeypatch.setattr(
        checkpoint,
        "_narrow_weights",
        lambda config, device, dtype, kept: (None, LibraryWeights.of(config, device, dtype, kept=kept)),
    )
    return Layer


def weight_of(kind: str) -> Codes | FloatCodes:
    """A weight [256, 256] as a checkpoint has it, by the format and its group or tile."""
    form, bits, size = kind.split("-")
    if form == "fp8":
        codes = torch.randn(256, 256, generator=CHANCE).mul(100).to(torch.float8_e4m3fn)
        tile = {"tiles": (128, int(size)), "features": (1, 256), "one": (256, 256)}[bits]
        scales = torch.rand(256 // tile[0], 256 // tile[1], generator=CHANCE)
        return FloatCodes(codes, scales.bfloat16().float() if bits == "features" else scales, tile)
    shape, most = (256, 256 // int(size)), 1 << int(bits)
    codes = torch.randint(most, (256, 256), generator=CHANCE).to(torch.uint8)
    zeros = torch.randint(most, shape, generator=CHANCE)
    scales = torch.rand(shape, generator=CHANCE).half()
    return Codes(int(bits), codes, scales, zeros if form == "free" else torch.full(shape, most // 2))


HELD = {
    **{f"{form}-4-{size}": torch.float16 for form in ("free", "symmetric") for size in (32, 64, 128)},
    "symmetric-8-128": torch.float16,
    "fp8-tiles-128": torch.bfloat16,
    "fp8-one-0": torch.bfloat16,
    "fp8-features-0": torch.bfloat16,
}


@pytest.mark.cpu
@pytest.mark.parametrize("kind", HELD)
def test_codes_of_a_checkpoint_are_handed_over(kind: str) -> None:
    weight = weight_of(kind)
    blocks = weight.blocks()
    assert blocks is not None
    found = humming_tensors(blocks, HELD[kind])
    assert found is not None
    form, tensors = found
    assert torch.equal(numbers(form, tensors), weight.numbers())
    size = int(kind.rpartition("-")[2])
    assert form.get("group_size", 0) == (128 if kind == "fp8-one-0" else size)
    held = sum(each.numel() * each.element_size() for each in tensors.values())
    assert held <= 256 * 256 * (0.5 if "-4-" in kind else 1) * (1 + 5 / (size or 128))


@pytest.mark.cpu
@pytest.mark.parametrize("kind", HELD)
def test_humming_takes_what_is_handed_over(kind: str) -> None:
    pytest.importorskip("humming")
    from humming.schema import BaseWeightSchema

    form, tensors = humming_tensors(weight_of(kind).blocks(), HELD[kind])  # type: ignore[misc, arg-type]
    schema = BaseWeightSchema.from_config({"quant_method": "humming", **form})
    schema.validate_tensors(tensors, 256, 256, HELD[kind])
    if "-4-" not in kind:
        return
    weight = weight_of(kind)
    assert isinstance(weight, Codes)
    blocks = weight.blocks()
    assert blocks is not None
    found = humming_tensors(blocks, torch.float16)
    assert found is not None
    shifts = torch.arange(0, 32, 4)
    of_inputs, of_features = (
        (each.long().unflatten(-1, (-1, 8)) << shifts).sum(-1).to(torch.int32)
        for each in (weight.codes, weight.zeros.T)
    )
    gptq = {"bits": 4, "group_size": form["group_size"], "sym": "zero_point" not in tensors}
    schema = BaseWeightSchema.from_config({"quant_method": "gptq", **gptq})
    theirs = {"qweight": of_inputs.T.contiguous(), "scales": weight.scales.T, "qzeros": of_features}
    _, expected = schema._convert_humming(theirs, [256], [256], torch.float16)
    assert expected.keys() == found[1].keys()
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in expected.items())


@pytest.mark.cpu
def test_weights_that_humming_does_not_hold_exactly() -> None:
    dense = torch.randn(128, 64, generator=CHANCE)
    assert humming_tensors(quantize(dense, "Q4_0"), torch.float16) is not None
    assert humming_tensors(quantize(dense, "Q4_0"), torch.bfloat16) is None  # rounds scales
    assert humming_tensors(quantize(dense[:64], "Q4_0"), torch.float16) is None
    head = torch.rand(128, 2, 2, generator=CHANCE).half().view(torch.uint8)  # scales and minima
    minima = Blocks("Q4_1", torch.cat([head, torch.zeros(128, 2, 16, dtype=torch.uint8)], -1).flatten(1))
    assert humming_tensors(minima, torch.float16) is None
    assert humming_tensors(Blocks("Q4_K", torch.zeros(128, 144, dtype=torch.uint8)), torch.float16) is None
    tiles = FloatCodes(torch.ones(128, 64).to(torch.float8_e4m3fn), torch.rand(128, 2), (1, 32)).blocks()
    assert tiles is not None and humming_tensors(tiles, torch.bfloat16) is None


def save_fp8(path: Path) -> nn.Module:
    """Save a Llama whose linear layers are of fp8 in tiles of 128. Returns the model of the same numbers."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_tiny_llama(path, seed=0, num_hidden_layers=1, **sizes)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tensors = dict(model.state_dict())
    for name, part in model.model.named_modules():
        if isinstance(part, nn.Linear):
            codes = torch.randn(part.weight.shape, generator=CHANCE).mul(100).to(torch.float8_e4m3fn)
            scales = torch.rand(*(size // 128 for size in codes.shape), generator=CHANCE) / 2000
            part.weight.data = FloatCodes(codes, scales, (128, 128)).numbers()
            tensors |= {f"model.{name}.weight": codes, f"model.{name}.weight_scale_inv": scales}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(values))
    return model


@pytest.mark.cpu
def test_from_a_checkpoint_to_answers(tmp_path: Path, stand_in: type[Layer]) -> None:
    model = save_fp8(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        expected = model(ids).logits[0, -1].log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False)
    options: dict[str, Any] = {"kv_memory": "8MiB", "device": "cpu", "dtype": "float16"}
    # Its trial at load is of 40 tokens, which the interpreter takes long for.
    with LLM(str(tmp_path), model_cache=False, verify_model=False, **options) as llm:
        found = llm.generate(ids.tolist(), params)[0].outputs[0].logprobs[0]
        loaded = llm._engine._executor._model
    for token, each in found.items():
        assert each.logprob == pytest.approx(float(expected[token]), abs=0.05)
    layers = model.config.num_hidden_layers
    shapes = {(512, 256): 2 * layers, (256, 256): 2 * layers}  # fused, and not tried in vain
    assert {shape: [each.shape for each in stand_in.made].count(shape) for shape in shapes} == shapes
    assert len(stand_in.made) == 4 * layers and not any(each.activations for each in stand_in.made)
    assert loaded.library == LibraryWeights(weight_dtype="auto")
    engine = EngineConfig(model=ModelConfig(tmp_path, dtype="float16", device="cpu", model_cache=False))
    assert _identity(loaded, engine) != _identity(replace(loaded, library=None), engine)
    assert not any(getattr(part, "kept_blocks", None) for part in loaded.model.modules())


def narrowed(form: str, architecture: str = "llama-gqa", num_layers: int | None = None, **wide: bool) -> Any:
    model = bound(architecture, torch.bfloat16, num_layers)
    before = run_model(model, MAX_POSITION, Step())
    weights = LibraryWeights(**wide, weight_dtype=form)
    optimize.optimize_model(model, probe_geometry(model), MAX_POSITION, library=weights)
    after = run_model(model, MAX_POSITION, Step())
    assert 1e-3 < float((after - before).norm() / before.norm()) < 0.5
    return model


def products(part: Any) -> list[type]:
    return [type(each) for each in part.modules() if isinstance(each, HummingLinear | nn.Linear)]


@pytest.mark.cpu
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_fused_layers_keep_four_narrow_products(form: str, stand_in: type[Layer]) -> None:
    model = narrowed(form, num_layers=1)
    layers = layers_of(model)
    assert all(type(layer) is FusedLayer for layer in layers)
    assert products(model) == [HummingLinear] * (4 * len(layers) + 1)
    assert {each.activations.get("dtype") for each in stand_in.made} == {
        "float8e4m3" if form == "fp8" else None
    }
    linear = nn.Linear(96, 64, dtype=torch.bfloat16)  # inputs that are no whole groups
    assert torch.equal(LibraryWeights(weight_dtype="int4").join([linear]).weight, linear.weight)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("options", "dtype", "capability", "message"),
    [
        ({}, torch.float32, (9, 0), "needs dtype bfloat16 or float16, got float32"),
        ({}, torch.bfloat16, (7, 5), "needs compute capability 8.0, and cuda has 7.5"),
        ({}, torch.float16, (7, 0), "needs compute capability 7.5, and cuda has 7.0"),
        ({"optimize": False}, torch.bfloat16, (9, 0), "on cuda needs optimize, got False"),
    ],
)
def test_what_a_form_needs(
    options: dict[str, Any],
    dtype: torch.dtype,
    capability: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library_weights, "_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=f"weight_dtype int4 {message}"):
        LibraryWeights.of(ModelConfig(weight_dtype="int4", **options), CUDA, dtype)


@pytest.mark.cpu
def test_a_form_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.process.extras.entry_points", lambda **_: ())
    with pytest.raises(ConfigError, match="int4 on cuda needs winnow-humming: in a checkout"):
        checkpoint._narrow_weights(ModelConfig(weight_dtype="int4"), CUDA, torch.bfloat16)


@pytest.mark.cpu
@pytest.mark.parametrize(("form", "device"), [("fp8", "cpu"), ("int4", "cpu"), ("q8_0", "cuda")])
def test_a_device_without_a_form(form: str, device: str) -> None:
    needed = "cuda" if device == "cpu" else "cpu"
    with pytest.raises(ConfigError, match=f"weight_dtype {form} needs device {needed}, got {device}"):
        checkpoint._narrow_weights(
            ModelConfig(weight_dtype=form), torch.device(device), torch.bfloat16, kept=False
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")
@pytest.mark.parametrize("kind", [*HELD, "int8", "fp8", "int4"])
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_products_on_a_gpu(kind: str, rows: int) -> None:
    pytest.importorskip("humming")
    dtype = HELD.get(kind, torch.bfloat16)
    if kind in HELD:
        weight = weight_of(kind)
        linear = linear_of(weight.numbers().to(CUDA, dtype), torch.randn(256, device=CUDA, dtype=dtype))
        linear.kept_blocks = {"weight": weight.blocks()}  # type: ignore[assignment]
        made = LibraryWeights(weight_dtype="auto").join([linear])
    else:
        linear = linear_of(torch.randn(256, 256, device=CUDA, dtype=dtype))
        made = LibraryWeights(weight_dtype=kind).join([linear])
    assert type(made) is HummingLinear
    x = torch.randn(1, rows, 256, device=CUDA, dtype=dtype)
    expected, found = F.linear(x.double(), linear.weight.double()), made(x).double()
    if linear.bias is not None:
        expected = expected + linear.bias.double()
    allowed = {"int8": 0.02, "fp8": 0.06, "int4": 0.15}.get(kind, 0.01)
    assert float((found - expected).norm() / expected.norm()) < allowed
