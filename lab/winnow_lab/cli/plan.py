"""`winnow plan`: what fits on which hardware, and how fast it is there."""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.cli.flags.engine import COMMON
from winnow.cli.flags.options import add_flags, add_model_argument, given, require_model
from winnow.cli.flags.paths import check_json_path, write_json
from winnow.config import (
    PREFIX_DISK,
    WEIGHT_DTYPES,
    CacheConfig,
    EvictionConfig,
    ModelConfig,
    SchedulerConfig,
)
from winnow.errors import UsageError
from winnow.report.provenance import typed_command
from winnow_lab.report.tables import console, print_tables
from winnow_lab.study import flag
from winnow_lab.study.options import Flags, add_options, options_of

if TYPE_CHECKING:
    from winnow_lab.plan.deployment import Deployment
    from winnow_lab.plan.occupancy import Request

DESCRIPTION = """\
Tell what a model needs, before anything is bought: memory, the largest batch, the longest context,
the fewest devices, tokens per second, and what binds. Reads config.json or a GGUF file's metadata;
nothing is downloaded and no weights are read.

MODEL is a directory, a config.json, a GGUF file, or a name such as llama-3-70b.
"""
EPILOG = """\
examples:
  winnow plan llama-3-8b --gpu L4 --context 8192
  winnow plan llama-3-70b --gpu A100,H100 --gpus 4 --batch 64 --context 4096 --json plan.json
  winnow plan llama-2-7b --gpu A100 --value-tier host:L=1,N=64
  winnow plan llama-3-8b --gpu L4 --eviction full,snapkv,kv-compress-pd --compression 4 --price 0.8
  winnow plan ./model --hardware this --calibrate bench.json
"""
_NOT_PLANNED = ("kv_memory", "enable_prefix_caching", "prefix_store", *PREFIX_DISK)
"""Options of the cache that say nothing about what fits."""


@dataclass(frozen=True)
class DeviceOptions(Flags):
    gpu: tuple[str, ...] = flag(
        ("A100",), "names of data sheets; this: the machine at hand", aliases=("hardware",)
    )
    gpus: int = flag(1, "devices that the model is spread over")
    dtype: str = flag("auto", "of weights; auto: on a CPU what the engine takes, else the model's own")
    weight_bits: float | None = flag(None, "bits of one weight, for quantized weights")
    weight_dtype: str = flag("auto", "of linear layers; auto: as dtype", choices=WEIGHT_DTYPES)
    utilization: float = flag(0.9, "part of the devices' memory that may be used")
    calibrate: tuple[Path, ...] | None = flag(
        None, "JSON of `winnow bench throughput` there, repeated", metavar="FILE"
    )
    json: Path | None = flag(None, "write all numbers as JSON too")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_json_path(self.json)


@dataclass(frozen=True)
class Options(DeviceOptions):
    batch: int | None = flag(None, "requests at once (default: what fits, max_num_seqs at most)", least=1)
    context: int | None = flag(None, "of prompt and answer (default: the model's, 4096 at most)", least=1)
    new_tokens: int | None = flag(None, "of each answer (default: 256, half the context at most)", least=1)
    price: float | None = flag(None, "of one device for an hour, for the cost of a million tokens")
    request_rate: float | None = flag(None, "requests per second of a fleet, for its replicas", least=0)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow plan MODEL [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_model_argument(parser, "directory, config.json, GGUF file, or name", flag=True)
    add_options(parser, Options)
    add_engine_parts(parser, _NOT_PLANNED)


def add_engine_parts(parser: argparse.ArgumentParser, skip: tuple[str, ...]) -> None:
    """Declare the options of an engine that a deployment has, but for `skip` of the cache."""
    add_flags(parser, CacheConfig, "how KVs are stored", skip=skip, common=COMMON)
    add_flags(parser, EvictionConfig, "eviction; several policies: commas between", common=COMMON)
    add_flags(parser, SchedulerConfig, "a step", common=COMMON)


def execute(namespace: argparse.Namespace) -> int:
    require_model(namespace, "plan")
    options = options_of(Options, namespace)
    most = given(namespace, SchedulerConfig).get("max_num_seqs")
    if options.batch is not None and most is not None and options.batch > most:
        raise UsageError(f"batch must be at most max_num_seqs ({most}), got {options.batch}")
    found = _beside_full(deployments(namespace, options, options.batch, options.price))
    from winnow_lab.plan.plan_tables import plan_of, plan_tables
    from winnow_lab.plan.value_tier import gain_of, tier_table

    request = _request(options, found[0])
    plans = [plan_of(each, request, options.batch, options.request_rate) for each in found]
    tier = found[0].layout.value_tier
    gains = [] if tier is None else [gain_of(plan, tier) for plan in plans]
    tables = plan_tables(plans)
    if tier is not None:
        tables.append(tier_table(tables[0].columns, gains, tier))
    print_tables(console(), tables, dense=True)
    head: dict[str, Any] = {"command": typed_command()}
    asked = [plan for plan in plans if not plan.keeps_all] or plans
    if len(asked) == 1:
        head |= asked[0].to_json()
    if gains:
        head["value_tier"] = [gain.to_json() for gain in gains]
    write_json(options.json, head | {"plans": [plan.to_json() for plan in plans]})
    return 0


def deployments(
    namespace: argparse.Namespace,
    options: DeviceOptions,
    batch: int | None = None,
    price: float | None = None,
) -> "list[Deployment]":
    """One per device and policy named. `batch`: what an engine lets run; None: what was typed, or its default."""
    from winnow.models.load.automatic import SMALL, cpu_dtype, keeps_blocks
    from winnow_lab.plan.calibrate import calibrate
    from winnow_lab.plan.deployment import Deployment
    from winnow_lab.plan.hardware import find_hardware
    from winnow_lab.plan.models import find_model

    model = find_model(namespace.model)
    amounts = given(namespace, EvictionConfig)
    names = str(amounts.pop("eviction", "")).split(",")
    configs = [_eviction(name.strip(), amounts) for name in names]
    limits = given(namespace, SchedulerConfig)
    scheduler = SchedulerConfig(**limits)
    if batch is not None and "max_num_seqs" not in limits:
        tokens = max(scheduler.max_num_batched_tokens, batch)
        scheduler = replace(scheduler, max_num_seqs=batch, max_num_batched_tokens=tokens)
    stored = given(namespace, CacheConfig).items()
    cache = CacheConfig(**{name: value for name, value in stored if value is not None})
    found = []
    on_cpu = cpu_dtype(model.stored_bytes, model.dtype)
    own = options.dtype == "auto" and options.weight_bits is None and model.stored_bytes >= SMALL
    asked = ModelConfig(weight_dtype=options.weight_dtype)
    kept = own and options.weight_dtype == "auto" and keeps_blocks(asked, Path(namespace.model))
    few_bits = model.stored_bytes < 0.8 * model.num_params  # of 4 bits rather than 8
    linear = options.weight_dtype if not kept else "q4_0" if few_bits else "q8_0"
    for device in options.gpu:
        hardware = find_hardware(device, options.dtype, linear, model.dtype, on_cpu)
        narrow = linear != options.weight_dtype and hardware.kind == "cpu"
        factors = None
        if options.calibrate:
            factors, errors = calibrate(options.calibrate, hardware)
            for source, off in errors.items():
                named = zip(("the run", "the first token", "a decode step"), off, strict=True)
                said = ", ".join(f"{error:+.1%} of {what}" for what, error in named if error is not None)
                print(f"calibrated to {source}: off by {said}", file=sys.stderr)
        found += [
            Deployment(
                model,
                hardware,
                options.gpus,
                options.dtype,
                options.weight_bits,
                cache,
                config,
                scheduler,
                options.utilization,
                price,
                factors,
                linear if narrow else options.weight_dtype,
            )
            for config in configs
        ]
    return found


def _beside_full(found: "list[Deployment]") -> "list[Deployment]":
    """The same, with the full cache before what stands on a device without it."""
    out: list[Deployment] = []
    with_full = {each.hardware.name for each in found if each.keeps_all}
    for each in found:
        if each.hardware.name not in with_full:
            with_full.add(each.hardware.name)
            plain = EvictionConfig(num_accumulators=each.eviction.num_accumulators)
            out.append(replace(each, eviction=plain))
        out.append(each)
    return out


def _eviction(name: str, amounts: dict[str, Any]) -> EvictionConfig:
    """A policy with the amounts that were typed; the full cache takes none, and stands beside the others."""
    from winnow.eviction import resolve_policy

    if not name:
        return EvictionConfig(**amounts)
    plain = EvictionConfig(eviction=name)
    if not resolve_policy(plain).takes_amount:
        amounts = {key: value for key, value in amounts.items() if key not in ("compression", "kv_budget")}
    return replace(plain, **amounts)


def _request(options: Options, deployment: "Deployment") -> "Request":
    from winnow_lab.plan.occupancy import Request

    context = options.context or min(deployment.model.max_model_len or 4096, 4096)
    new_tokens = options.new_tokens or max(min(256, context // 2), 1)
    if options.new_tokens is not None and new_tokens >= context:
        raise UsageError(
            f"new_tokens must be below context ({context}), which holds the prompt too, got {new_tokens}"
        )
    return Request(max(context - new_tokens, 1), new_tokens)
