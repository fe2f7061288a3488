"""Linear layers that torchao quantizes, on CPU tensors: alone, in fused layers, and from a checkpoint to answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_llama import save_tiny_llama
from torch import nn

pytest.importorskip("torchao")
pytest.importorskip("triton")
from optimizing import MAX_POSITION, Step, bound, layers_of
from torchao.quantization import quant_api

from winnow import LLM, SamplingParams
from winnow.config import EngineConfig, ModelConfig
from winnow.errors import ConfigError
from winnow.executor.build import _identity
from winnow.models import load_model
from winnow.models.bind.geometry_probe import probe_geometry
from winnow.models.fast import library_weights, optimize
from winnow.models.fast.fused.layer import FusedLayer
from winnow.models.fast.fused.probe import run_model
from winnow.models.fast.library_weights import LibraryWeights
from winnow.models.load import checkpoint

pytestmark = pytest.mark.cpu
CUDA = torch.device("cuda")


@pytest.fixture
def fp8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies fp8 as a GPU of capability 8.9 does."""
    monkeypatch.setattr(library_weights, "_capability", lambda device: (8, 9))
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)


def kinds(model: Any) -> list[str]:
    """Kinds of the weights of linear layers, as often as they occur."""
    return [type(part.weight).__name__ for part in model.modules() if type(part) is nn.Linear]


def narrowed(form: str, architecture: str = "llama-gqa", **wide: bool) -> Any:
    model = bound(architecture, torch.bfloat16)
    before = run_model(model, MAX_POSITION, Step())
    weights = LibraryWeights(**wide, weight_dtype=form)
    optimize.optimize_model(model, probe_geometry(model), MAX_POSITION, library=weights)
    after = run_model(model, MAX_POSITION, Step())
    assert 1e-3 < float((after - before).norm() / before.norm()) < 0.2
    return model


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimize, "_passes_fit", lambda model: True)


@pytest.mark.parametrize(("form", "kind"), [("int8", "Int8Tensor"), ("fp8", "Float8Tensor")])
def test_fused_layers_keep_four_narrow_products(form: str, kind: str, as_on_a_gpu: None) -> None:
    model = narrowed(form)
    layers = layers_of(model)
    assert all(type(layer) is FusedLayer for layer in layers)
    assert kinds(model) == [kind] * (4 * len(layers) + 1)


def test_products_of_fp8(as_on_a_gpu: None, fp8_products: None) -> None:
    model = narrowed("fp8")
    weight = layers_of(model)[0].down.weight
    assert weight.act_quant_kwargs is not None and weight.scale.shape == (weight.shape[0], 1)


@pytest.mark.parametrize("fused", [True, False])
def test_layers_and_heads_that_stay_wide(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimize, "_passes_fit", lambda model: fused)
    model = narrowed("int8", wide_ends=True, wide_head=True)
    layers = layers_of(model)
    assert len(layers) > 2
    for index, layer in enumerate(layers):
        expected = "Parameter" if index in (0, len(layers) - 1) else "Int8Tensor"
        assert set(kinds(layer)) == {expected}
        assert (type(layer) is FusedLayer) == fused
    assert type(model.lm_head.weight) is nn.Parameter


def test_layers_of_another_form_are_narrow_too(as_on_a_gpu: None) -> None:
    model = narrowed("int8", "gpt-oss")
    assert not any(type(layer) is FusedLayer for layer in layers_of(model))
    assert set(kinds(model)) == {"Int8Tensor"}


def test_groups_of_int4() -> None:
    """Its products run on GPUs alone; torchao leaves a weight wide whose inputs are not whole groups."""
    weights = LibraryWeights(weight_dtype="int4")
    assert weights._config(CUDA).group_size == 128
    linear = nn.Linear(96, 16, dtype=torch.bfloat16)
    assert torch.equal(weights.join([linear]).weight, linear.weight)


@pytest.fixture
def as_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's device is a CPU, and its weights are chosen as for a GPU."""
    monkeypatch.setattr(
        checkpoint,
        "_narrow_weights",
        lambda config, device, dtype: (None, LibraryWeights.of(config, device, dtype)),
    )


def test_from_a_checkpoint_to_answers(tmp_path: Path, as_for_a_gpu: None) -> None:
    save_tiny_llama(tmp_path, seed=0, hidden_size=64, intermediate_size=64)
    options: dict[str, Any] = {
        "kv_memory": "8MiB",
        "device": "cpu",
        "dtype": "bfloat16",
        "model_cache": False,
    }
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    for form in ("int8", "fp8"):
        with LLM(str(tmp_path), weight_dtype=form, **options) as llm:
            assert len(llm.generate([[5, 6, 7, 8] * 4], params)[0].outputs[0].token_ids) == 8


def test_another_form_is_another_model(tmp_path: Path, as_for_a_gpu: None) -> None:
    save_tiny_llama(tmp_path, seed=0, hidden_size=64, intermediate_size=64)
    configs = [
        EngineConfig(
            model=ModelConfig(tmp_path, dtype="bfloat16", weight_dtype=form, device="cpu", model_cache=False)
        )
        for form in ("int8", "fp8")
    ]
    assert len({_identity(load_model(config.model), config) for config in configs}) == 2


@pytest.mark.parametrize(
    ("form", "dtype", "message"),
    [
        ("fp8", torch.float16, "weight_dtype fp8 needs dtype bfloat16, got float16"),
        ("int4", torch.float32, "weight_dtype int4 needs dtype bfloat16, got float32"),
        ("int4", torch.bfloat16, "weight_dtype int4 needs compute capability 8.0, and cuda has 7.5"),
    ],
)
def test_what_a_form_needs(
    form: str, dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_weights, "_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=message):
        LibraryWeights.of(ModelConfig(weight_dtype=form), CUDA, dtype)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_weights, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"weight_dtype int8 on cuda needs the package torchao: .*\[torchao\]"
    ):
        LibraryWeights.of(ModelConfig(weight_dtype="int8"), CUDA, torch.bfloat16)


@pytest.mark.parametrize(("form", "device"), [("fp8", "cpu"), ("int4", "cpu"), ("q8_0", "cuda")])
def test_a_device_without_a_form(form: str, device: str) -> None:
    needed = "cuda" if device == "cpu" else "cpu"
    with pytest.raises(ConfigError, match=f"weight_dtype {form} needs device {needed}, got {device}"):
        checkpoint._narrow_weights(ModelConfig(weight_dtype=form), torch.device(device), torch.bfloat16)
