"""What a deployment needs: bytes as the engine counts them, and inverses that invert."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from winnow.cache import CacheSize
from winnow.config import EvictionConfig, SchedulerConfig
from winnow.errors import CapacityError, ConfigError, UnsupportedModelError
from winnow.models.fast import packed_linear
from winnow.models.load import automatic
from winnow.models.model.blocks import BlockWeights
from winnow_lab.plan import hardware
from winnow_lab.plan.deployment import Deployment
from winnow_lab.plan.hardware import HARDWARE, find_hardware
from winnow_lab.plan.models import MODELS, find_model, shape_of_config
from winnow_lab.plan.occupancy import Held, Request
from winnow_lab.plan.plan_tables import plan_of, plan_tables
from winnow_lab.plan.step_time import Factors, StepWork

IDEAL = Factors(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0)  # of the data sheet


def deployment(model: str = "llama-3-8b", gpu: str = "L4", **options: object) -> Deployment:
    return Deployment(MODELS[model], HARDWARE[gpu], **options)  # type: ignore[arg-type]


def test_bytes_of_the_70b_model() -> None:
    plan = plan_of(deployment("llama-3-70b", "A100", gpus=4), Request(4096 - 256, 256), 64).to_json()
    assert plan["kv_bytes_per_token"] == 327_680
    assert plan["kv_bytes"] == 85_899_345_920
    assert plan["weight_bytes"] == 2 * MODELS["llama-3-70b"].num_params
    assert plan["weight_bytes"] == pytest.approx(141e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("llama-3.2-1b", 1.236),
        ("mistral-7b", 7.24),
    ],
)
def test_presets_have_as_many_weights_as_the_published_models(name: str, billions: float) -> None:
    assert MODELS[name].num_params == pytest.approx(billions * 1e9, rel=0.001)


def test_a_configuration_counts_as_the_model_built_from_it() -> None:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    shape = shape_of_config(config.to_dict(), "tiny")
    model = AutoModelForCausalLM.from_config(config)
    assert shape.num_params == model.num_parameters()
    assert (shape.rows, shape.head_dim, shape.lookup_params) == (4, 8, 97 * 32)


def test_a_directory_is_read_without_weights(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=8)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert find_model(tmp_path).num_layers == 2
    assert find_model(tmp_path / "config.json").file_bytes is None


@pytest.mark.parametrize(
    "text", ["{}", '{"model_type": "no-such-kind"}', '{"model_type": "llama", "hidden_size": -1}']
)
def test_unusable_configurations_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModelError):
        find_model(tmp_path)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="llama-3-8b"):
        find_model("llama-3-8")
    with pytest.raises(ConfigError, match="L4"):
        find_hardware("L44")


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    planned, request = deployment(), Request(1920, 128)
    batch = planned.largest_batch(request)
    assert planned.cache_bytes(request, batch) <= planned.kv_room < planned.cache_bytes(request, batch + 1)


@given(
    prompt=st.integers(1, 4000),
    new=st.integers(1, 500),
    name=st.sampled_from(["full", "snapkv", "batch-max"]),
)
def test_inverses_agree(prompt: int, new: int, name: str) -> None:
    planned, request = deployment(eviction=EvictionConfig(eviction=name)), Request(prompt, new)
    batch = planned.largest_batch(request)
    assert batch > 0
    assert planned.longest_context(batch, new) >= prompt + new
    assert planned.fewest_gpus(request, batch) == 1


def test_the_batch_is_what_an_engine_of_that_memory_admits() -> None:
    planned, request = deployment(), Request(1000, 24)
    layout = planned.layout
    size = CacheSize.fit(layout, planned.cache_bytes(request, 7), 7, request.computed)
    assert size.num_blocks == 7 * layout.blocks_for(request.computed)


def test_compression_is_what_lets_the_batch_fit() -> None:
    planned, request = deployment(gpu="A100"), Request(8000, 192)
    batch = 3 * planned.largest_batch(request)
    rate = planned.needed_compression(request, batch)
    assert rate is not None and rate == pytest.approx(3, rel=0.15)
    compressed = deployment(gpu="A100", eviction=EvictionConfig(eviction="batch-max", compression=1.3 * rate))
    assert compressed.largest_batch(request) >= batch


@pytest.mark.parametrize(
    ("prompt", "batch", "said"),
    [
        (8000, 200, "yes"),  # 56 prompts of the full cache fit
        (8000, 8, "no: memory holds the prompts"),
        (900, 200, "no: prompts are within the budget"),
    ],
)
def test_rounds_within_the_prompt_are_for_prompts_that_memory_does_not_hold(
    prompt: int, batch: int, said: str
) -> None:
    """Batch-Max, section 1."""
    planned = deployment(gpu="A100", eviction=EvictionConfig(eviction="batch-max", kv_budget=1024))
    plan = plan_of(planned, Request(prompt, 192), batch)
    assert plan.to_json()["evict_within_prompt"] == said
    limits = next(table for table in plan_tables([plan]) if table.title == "Limits")
    assert ("evict within the prompt", (said,)) in [(name, tuple(cells)) for name, cells in limits.rows]
    full = plan_of(deployment(gpu="A100"), Request(prompt, 192), batch)
    assert "evict within the prompt" not in [name for table in plan_tables([full]) for name, _ in table.rows]


def test_weights_that_do_not_fit_leave_no_batch() -> None:
    planned, request = deployment("llama-3-70b"), Request(100, 20)
    assert planned.kv_room < 0
    assert planned.largest_batch(request) == planned.longest_context(1, 20) == 0
    assert planned.needed_compression(request, 1) is None
    assert planned.fewest_gpus(request, 1) > 1
    assert plan_of(planned, request, None).to_json()["binds"] == "memory"


def test_activations_that_fill_a_card_leave_no_number_of_cards() -> None:
    with pytest.raises(CapacityError, match="L4"):
        deployment(utilization=0.01, scheduler=SchedulerConfig(64, 65536)).fewest_gpus(Request(10, 1), 1)


def test_what_binds() -> None:
    times = deployment("llama-3-8b", "A100", factors=IDEAL).times
    assert times.binds(StepWork.decode(1, 100)) == "bandwidth (weights)"
    assert times.binds(StepWork.decode(256, 8000)) == "bandwidth (KVs)"
    assert times.binds(StepWork.prefill(4096, 0)) == "compute"
    assert times.binds(StepWork(link_bytes=1e9)) == "link to the host"


def test_a_cpu_takes_what_the_engine_does_and_a_gpu_what_the_model_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert deployment(gpu="epyc-9654").weight_bytes == deployment().weight_bytes
    here = replace(HARDWARE["epyc-9654"], measured=True)
    for isa, wider in (("avx2", 1), (None, 2)):
        monkeypatch.setattr(automatic, "instruction_set", lambda answer=isa: answer)
        assert Deployment(MODELS["llama-3-8b"], here).weight_bytes == wider * deployment().weight_bytes
    wide = replace(MODELS["llama-3-8b"], dtype="float32")
    assert Deployment(wide, HARDWARE["epyc-9654"]).weight_dtype == "float32"


def test_int8_weights_leave_the_embedding_wide() -> None:
    model = MODELS["llama-3-8b"]
    looked_up = 128256 * 4096
    assert deployment(linear_dtype="int8").weight_bytes == model.num_params + looked_up
    tied = MODELS["smollm2-135m"]
    assert deployment("smollm2-135m", linear_dtype="int8").weight_bytes == tied.num_params
    assert deployment("smollm2-135m", linear_dtype="q8_0").weight_bytes == tied.num_params * 17 / 16
    with pytest.raises(ConfigError, match="weight_bits must be left out beside int8 weights, got 4"):
        deployment(linear_dtype="int8", weight_bits=4)


def test_held_of_no_sequence() -> None:
    assert Held(10, 4).of_batch(0) == 0
    assert Held(10, 4).largest_batch(9) == 0
    assert Held(10, 4).largest_batch(18) == 3


def test_the_ideal_step_is_the_papers_bandwidth_model() -> None:
    times = deployment("llama-3-70b", "A100", gpus=4, factors=IDEAL).times
    ideal = times.ideal(StepWork.decode(64, 2048))
    assert ideal["kv"] == pytest.approx(40 * 2**30 / (4 * 2039e9))
    assert ideal["weights"] == pytest.approx(139e9 / (4 * 2039e9), rel=0.01)


def test_a_configuration_without_a_dtype_is_bfloat16_as_the_engine_takes_it() -> None:
    config = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=8)
    values = {key: value for key, value in config.to_dict().items() if key not in ("dtype", "torch_dtype")}
    assert shape_of_config(values, "tiny").dtype == "bfloat16"


def test_this_machine_is_measured_in_the_type_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product is one of the engine's own linear layers: of int8 weights where the run has such."""
    monkeypatch.setattr(hardware, "_MEASURED", 0.0)
    monkeypatch.setattr(hardware, "_MEMORY", 2**25)
    monkeypatch.setattr("winnow.report.provenance.cpu_cache_bytes", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    made = []
    make = packed_linear.linear_maker

    def spy(kernels: object, dtype: torch.dtype, **options: object) -> object:
        if "blocks" in options:
            made.append((dtype, options["blocks"]))
        return make(kernels, dtype, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(packed_linear, "linear_maker", spy)
    for words in (("auto", "auto"), ("bfloat16", "int8"), ("bfloat16", "q4_0")):
        found = find_hardware("this", *words)
        assert found.measured and found.kind == "cpu"
        assert min(found.compute, found.bandwidth, found.link, found.memory) > 1e8
    assert made == [
        (torch.float32, None),
        (torch.bfloat16, BlockWeights(kind="Q8_0")),
        (torch.bfloat16, BlockWeights(kind="Q4_0")),
    ]


@pytest.mark.parametrize(
    ("model", "gpus", "context", "new", "batch", "pressure", "printed"),
    [
        ("llama-3-8b", 1, 512, 256, 32, "low", "Short chat: Low"),
        ("llama-3.2-1b", 1, 4096, 256, 64, "medium", "Small model API: Low-Medium"),
        ("llama-3-8b", 1, 2048, 10, 64, "low", "Classification: Low, prefill dominated"),
        ("llama-3-70b", 4, 4096, 2048, 64, "high", "Long-form generation: High"),
        ("llama-3-70b", 4, 8192, 512, 64, "critical", "Multi-turn chat: Very High"),
        ("llama-3-70b", 4, 16384, 512, 32, "critical", "RAG with long context: Critical"),
    ],
)
def test_advice_is_that_of_the_text_on_kv_memory(
    model: str, gpus: int, context: int, new: int, batch: int, pressure: str, printed: str
) -> None:
    planned = plan_of(deployment(model, "A100", gpus=gpus), Request(context - new, new), batch)
    assert planned.to_json()["kv_pressure"] == pressure, printed
