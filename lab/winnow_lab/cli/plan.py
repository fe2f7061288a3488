"""`winnow plan`: what fits on which hardware, and how fast it is there."""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.cli.flags.engine import COMMON
from winnow.cli.flags.options import add_flags, add_model_argument, given, require_model
from winnow.cli.flags.paths import check_json_path, require_writable, write_json
from winnow.config import (
    PREFIX_DISK,
    WEIGHT_DTYPES,
    CacheConfig,
    EvictionConfig,
    ModelConfig,
    SchedulerConfig,
    option,
)
from winnow.errors import UsageError
from winnow.report.provenance import typed_command
from winnow.values.checks import check_integer, check_number
from winnow_lab.report.console import console, print_tables

if TYPE_CHECKING:
    from winnow_lab.plan.deployment import Deployment

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
class PlanOptions:
    """Deployment to plan for; lists take commas."""

    gpu: str = option(
        "A100", "devices, commas between: names of data sheets, or this for the machine at hand"
    )
    gpus: int = option(1, "devices that the model is spread over")
    batch: int | None = option(
        None, "requests at the same time; left out: as many as fit, max_num_seqs at most"
    )
    context: int | None = option(None, "tokens of prompt and answer; left out: the model's, 4096 at most")
    new_tokens: int | None = option(
        None, "tokens of each answer, of the context; left out: 256, half of it at most"
    )
    dtype: str = option("auto", "of weights; auto: on a CPU what the engine takes, else the model's own")
    weight_bits: float | None = option(None, "bits of one weight, for quantized weights")
    weight_dtype: str = option("auto", "of linear layers; auto: as dtype", choices=WEIGHT_DTYPES)
    utilization: float = option(0.9, "part of the devices' memory that may be used")
    price: float | None = option(None, "of one device for an hour, for the cost of a million tokens")
    request_rate: float | None = option(
        None, "requests per second that a fleet is to answer, for its replicas and devices"
    )


def add_hardware_flags(parser: argparse.ArgumentParser) -> None:
    """Declare `--hardware` and `--calibrate`, beside the flags of `PlanOptions`."""
    parser.add_argument("--hardware", dest="gpu", default=argparse.SUPPRESS, help="the same as --gpu")
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        type=Path,
        action="append",
        help="JSON of `winnow bench throughput` on the hardware, to fit the times to; may be repeated",
    )


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow plan MODEL [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_model_argument(parser, "directory, config.json, GGUF file, or name", flag=True)
    add_hardware_flags(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything planned as JSON too")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    parser.add_argument("--plot", metavar="STEM", type=Path, help="draw STEM.svg")
    add_flags(parser, PlanOptions, "what is planned for")
    add_flags(parser, CacheConfig, "how KVs are stored", skip=_NOT_PLANNED, common=COMMON)
    add_flags(parser, EvictionConfig, "eviction; several policies: commas between", common=COMMON)
    add_flags(parser, SchedulerConfig, "a step", common=COMMON)


def execute(namespace: argparse.Namespace) -> int:
    """Plan, show, and return the exit code."""
    check_json_path(namespace.json)
    require_model(namespace, "plan")
    options = PlanOptions(**given(namespace, PlanOptions))
    if options.context is not None:
        check_integer("context", options.context, 1)
    if options.new_tokens is not None:
        check_integer("new_tokens", options.new_tokens, 1)
    if options.request_rate is not None:
        check_number("request_rate", options.request_rate, 0.0)
    if options.batch is not None:
        check_integer("batch", options.batch, 1, 65536)
        most = given(namespace, SchedulerConfig).get("max_num_seqs")
        if most is not None and options.batch > most:
            raise UsageError(f"batch must be at most max_num_seqs ({most}), got {options.batch}")
    if namespace.plot is not None:
        require_writable(namespace.plot.with_name(f"{namespace.plot.name}.svg"), f"--plot {namespace.plot}")
    found = _beside_full(deployments(namespace, options))
    from winnow_lab.plan.plan_tables import plan_of, plan_tables
    from winnow_lab.plan.value_tier import gain_of, tier_table

    request = _request(options, found[0])
    plans = [plan_of(each, request, options.batch, options.request_rate) for each in found]
    tier = found[0].layout.value_tier
    gains = [] if tier is None else [gain_of(plan, tier) for plan in plans]
    tables = plan_tables(plans)
    if tier is not None:
        tables.append(tier_table(tables[0].columns, gains, tier))
    _print(tables, markdown=namespace.markdown)
    if namespace.plot is not None:
        from winnow_lab.plan.plots import plan_figure
        from winnow_lab.report.plots import save_figure

        save_figure(plan_figure(plans), namespace.plot)
    head: dict[str, Any] = {"command": typed_command()}
    asked = [plan for plan in plans if not plan.keeps_all] or plans
    if len(asked) == 1:
        head |= asked[0].to_json()
    if gains:
        head["value_tier"] = [gain.to_json() for gain in gains]
    write_json(namespace.json, head | {"plans": [plan.to_json() for plan in plans]})
    return 0


def deployments(namespace: argparse.Namespace, options: PlanOptions) -> "list[Deployment]":
    """Return one per device and policy that was named."""
    from winnow.models.load.automatic import SMALL, cpu_dtype, keeps_blocks
    from winnow_lab.plan.calibrate import calibrate
    from winnow_lab.plan.deployment import Deployment
    from winnow_lab.plan.hardware import find_hardware
    from winnow_lab.plan.models import find_model

    model = find_model(namespace.model)
    typed = given(namespace, EvictionConfig)
    names = str(typed.pop("eviction", "")).split(",")
    configs = [_eviction(name.strip(), typed) for name in names]
    limits = given(namespace, SchedulerConfig)
    scheduler = SchedulerConfig(**limits)
    if options.batch is not None and "max_num_seqs" not in limits:  # for an engine that lets so many run
        tokens = max(scheduler.max_num_batched_tokens, options.batch)
        scheduler = replace(scheduler, max_num_seqs=options.batch, max_num_batched_tokens=tokens)
    cache = CacheConfig(**given(namespace, CacheConfig))
    found = []
    on_cpu = cpu_dtype(model.stored_bytes, model.dtype)
    own = options.dtype == "auto" and options.weight_bits is None and model.stored_bytes >= SMALL
    asked = ModelConfig(weight_dtype=options.weight_dtype)
    kept = own and options.weight_dtype == "auto" and keeps_blocks(asked, Path(namespace.model))
    few_bits = model.stored_bytes < 0.8 * model.num_params  # of 4 bits rather than 8
    linear = options.weight_dtype if not kept else "q4_0" if few_bits else "q8_0"
    for device in options.gpu.split(","):
        hardware = find_hardware(device.strip(), options.dtype, linear, model.dtype, on_cpu)
        narrow = linear != options.weight_dtype and hardware.kind == "cpu"
        factors = None
        if namespace.calibrate:
            calibration = calibrate(namespace.calibrate, hardware)
            factors = calibration.factors
            for source, errors in calibration.errors:
                named = zip(("the run", "the first token", "a decode step"), errors, strict=True)
                off = ", ".join(f"{error:+.1%} of {what}" for what, error in named if error is not None)
                print(f"calibrated to {source}: off by {off}", file=sys.stderr)
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
                options.price,
                factors,
                linear if narrow else options.weight_dtype,
            )
            for config in configs
        ]
    return found


def _beside_full(found: "list[Deployment]") -> "list[Deployment]":
    """Return the same, with the full cache before what stands on a device without it."""
    out: list[Deployment] = []
    with_full = {each.hardware.name for each in found if each.keeps_all}
    for each in found:
        if each.hardware.name not in with_full:
            with_full.add(each.hardware.name)
            out.append(
                replace(each, eviction=EvictionConfig(num_accumulators=each.eviction.num_accumulators))
            )
        out.append(each)
    return out


def _eviction(name: str, amounts: dict[str, Any]) -> EvictionConfig:
    """Return a policy with the amounts that were typed; the full cache takes none, and stands beside the others."""
    from winnow.eviction import resolve_policy

    if not name:
        return EvictionConfig(**amounts)
    plain = EvictionConfig(eviction=name)
    if not resolve_policy(plain).takes_amount:
        amounts = {key: value for key, value in amounts.items() if key not in ("compression", "kv_budget")}
    return replace(plain, **amounts)


def _request(options: PlanOptions, deployment: "Deployment") -> Any:
    from winnow_lab.plan.occupancy import Request

    context = options.context or min(deployment.model.max_model_len or 4096, 4096)
    new_tokens = options.new_tokens
    if new_tokens is None:
        new_tokens = max(min(256, context // 2), 1)
    elif new_tokens >= context:
        raise UsageError(
            f"new_tokens must be below context ({context}), which holds the prompt too, got {new_tokens}"
        )
    return Request(max(context - new_tokens, 1), new_tokens)


def _print(tables: Any, *, markdown: bool) -> None:
    if markdown:
        print("\n".join(line for table in tables for line in table.markdown()))
    else:
        print_tables(console(), tables, dense=True)
