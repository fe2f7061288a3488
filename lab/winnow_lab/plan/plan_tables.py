"""A plan: one deployment with one kind of request, all its numbers, and tables of several."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from winnow.cli.known_accuracy import KnownAccuracy, known_accuracy
from winnow.config import EvictionConfig
from winnow.errors import CapacityError
from winnow.eviction import resolve_policy
from winnow.values.units import format_bytes
from winnow_lab.plan.deployment import Deployment, Performance
from winnow_lab.plan.occupancy import Request
from winnow_lab.report.tables import TextTable

# Parts of the KV memory that a batch takes, below which compressing KVs is not worth it or worth a look.
_LITTLE, _MUCH = 0.1, 0.3


@dataclass(frozen=True)
class Plan:
    """Plan that `plan_of` makes.

    Attributes:
        batch: requests at the same time: as asked for, or as many as fit and the scheduler lets run; 0: none fit.
        longest_context: tokens of prompt and answer at that batch.
        fewest_gpus: None: no number suffices.
        compression: tokens per KV kept at which the batch fits; None: at no rate.
        performance: None: nothing fits.
    """

    deployment: Deployment
    request: Request
    batch: int
    largest_batch: int
    longest_context: int
    fewest_gpus: int | None
    compression: float | None
    performance: Performance | None
    request_rate: float | None = None

    @property
    def replicas(self) -> int | None:
        """How many such deployments answer `request_rate` requests per second; None: no rate, or none fits."""
        if self.request_rate is None or self.performance is None:
            return None
        return max(math.ceil(self.request_rate * self.request.new_tokens / self.performance.output_rate), 1)

    @property
    def fits(self) -> bool:
        return 0 < self.batch <= self.largest_batch

    @property
    def keeps_all(self) -> bool:
        return self.deployment.keeps_all

    @property
    def accuracy(self) -> list[KnownAccuracy]:
        """Accuracy measured of the policy at about that compression; empty: nothing, or nothing is evicted."""
        eviction = self.deployment.bound(self.request)
        if self.keeps_all or eviction is None:
            return []
        policy = resolve_policy(self.deployment.eviction).name  # winnow stands for another
        compression = eviction.context_len / max(eviction.budget, 1)
        return known_accuracy(policy, compression, self.deployment.model.name)

    @property
    def kv_blocks(self) -> int:
        return self.deployment.held(self.request).of_batch(self.batch)

    @property
    def policy(self) -> str:
        chosen = self.deployment.eviction.chosen
        return chosen if isinstance(chosen, str) else "own"

    def _kv_bytes(self, num_blocks: int) -> int:
        layout = self.deployment.layout
        count = self.deployment.kinds(num_blocks)
        kvs = sum(n * kind.form.nbytes for n, kind in zip(count, layout.kinds, strict=True))
        return kvs - layout.tier_bytes(count)

    def to_json(self) -> dict[str, Any]:
        """All numbers by name, in bytes and seconds.

        `kv_bytes` are keys and values of the batch, in whole blocks; `kv_bytes_used` those with positions and
        accumulators, as `EngineStats.kv_bytes_used` counts; `tier_bytes` values on a value tier, which none of
        the others count; `cache_bytes` all of it with tables: the `kv_memory` that provides it.
        `host_bytes_per_request` is what a preempted request takes of the host tier, `host_requests` how many it holds.
        """
        deployment, layout = self.deployment, self.deployment.layout
        blocks = self.kv_blocks
        held = deployment.held(self.request)
        return deployment.to_json() | {
            "eviction": self.policy,
            "prompt_tokens": self.request.prompt_tokens,
            "new_tokens": self.request.new_tokens,
            "context": self.request.prompt_tokens + self.request.new_tokens,
            "batch": self.batch,
            "kv_bytes_per_token": deployment.kv_token_bytes,
            "state_bytes_per_request": layout.state_bytes,
            "kv_bytes_per_request": self._kv_bytes(held.decoding),
            "kv_bytes_per_request_peak": self._kv_bytes(held.peak),
            "kv_bytes": self._kv_bytes(blocks),
            "kv_bytes_used": layout.device_bytes(deployment.kinds(blocks)),
            "tier_bytes_per_token": deployment.far_token_bytes,
            "tier_bytes": layout.tier_bytes(deployment.kinds(blocks)),
            "cache_bytes": deployment.cache_bytes(self.request, self.batch) if self.batch else 0,
            "host_bytes_per_request": deployment.host_bytes(self.request),
            "host_requests": deployment.host_requests(self.request),
            "weight_bytes": deployment.weight_bytes,
            "file_bytes": deployment.model.file_bytes,
            "activation_bytes": deployment.activation_bytes,
            "kv_room": deployment.kv_room,
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "longest_context": self.longest_context,
            "fewest_gpus": self.fewest_gpus,
            "needed_compression": self.compression,
            "request_rate": self.request_rate,
            "replicas": self.replicas,
            "fleet_gpus": None if self.replicas is None else self.replicas * deployment.gpus,
            "performance": None if self.performance is None else vars(self.performance),
            "evict_within_prompt": evict_within_prompt(self),
            "binds": binds(self),
            "kv_pressure": kv_pressure(self),
            "accuracy": [each.to_json() for each in self.accuracy],
        }


def plan_of(
    deployment: Deployment, request: Request, batch: int | None, request_rate: float | None = None
) -> Plan:
    """Plan a deployment for requests of these lengths; `batch` None: as many as fit, `max_num_seqs` at most."""
    largest = deployment.largest_batch(request)
    count = min(largest, deployment.scheduler.max_num_seqs) if batch is None else batch
    try:
        fewest: int | None = deployment.fewest_gpus(request, max(count, 1))
    except CapacityError:
        fewest = None
    return Plan(
        deployment,
        request,
        count,
        largest,
        deployment.longest_context(max(count, 1), request.new_tokens),
        fewest,
        deployment.needed_compression(request, max(count, 1)),
        deployment.performance(request, count) if count else None,
        request_rate,
    )


def binds(plan: Plan) -> str:
    """What limits throughput: memory or `max_num_seqs`, if a larger batch would pay, else what takes longest."""
    if not plan.largest_batch:
        return "memory"
    assert plan.performance is not None, "a batch fits"
    most = plan.deployment.scheduler.max_num_seqs
    prompts, steps = _phases(plan)
    step = plan.performance.binds if steps >= prompts else f"prompts: {plan.performance.prefill_binds}"
    if plan.batch < min(plan.largest_batch, most):
        return step
    larger = plan.deployment.performance(plan.request, 2 * plan.batch)
    gains = larger.output_rate > 1.1 * plan.performance.output_rate
    if not gains:
        return step
    return "memory" if plan.batch >= plan.largest_batch else "max_num_seqs"


def _phases(plan: Plan) -> tuple[float, float]:
    """Seconds in which the batch computes its prompts, and those in which it decodes its answers."""
    assert plan.performance is not None, "a batch fits"
    return (
        plan.batch * plan.performance.prefill_seconds,
        plan.request.new_tokens * plan.performance.step_seconds,
    )


def kv_pressure(plan: Plan) -> str:
    """How much smaller KVs would bring, by the memory that the batch takes and the time of its prompts."""
    share = plan.batch / plan.largest_batch if plan.largest_batch else float("inf")
    if share >= 1.0:
        return "critical"
    prompts, decode = _phases(plan)
    if share < _LITTLE or decode < _LITTLE * prompts:
        return "low"
    return "medium" if share < _MUCH else "high"


def evict_within_prompt(plan: Plan) -> str | None:
    """Whether rounds within the prompt can bring anything at that batch, or only those while decoding do (Batch-Max,
    section 1): they are for batches whose prompts memory does not hold. None: nothing is evicted."""
    eviction = plan.deployment.bound(plan.request)
    if plan.keeps_all:
        return None
    if eviction is None or plan.request.prompt_tokens <= eviction.target:
        return "no: prompts are within the budget"
    whole, prompts = replace(plan.deployment, eviction=EvictionConfig()), replace(plan.request, new_tokens=1)
    return "no: memory holds the prompts" if whole.fits(prompts, plan.batch) else "yes"


def plan_tables(plans: Sequence[Plan]) -> list[TextTable]:
    """Memory, limits, speed and what is known of accuracy, a column for each plan."""
    first = plans[0]
    total = first.request.prompt_tokens + first.request.new_tokens
    about = f"{first.deployment.model.name}, {total} tokens ({first.request.new_tokens} new)"
    warning = (
        "Uncalibrated: step times may be off by half; --calibrate fits them to `winnow bench throughput`."
    )
    labelled = [(_label(plan, plans), plan) for plan in plans]

    def table(title: str, rows: Mapping[str, Callable[[Plan], str | None]], *notes: str) -> TextTable:
        return replace(TextTable.of(title, "", labelled, rows).transposed(), notes=notes)

    known = [] if all(plan.keeps_all for plan in plans) else [_accuracy(plans)]
    return [
        table(f"Memory: {about}", _memory(plans)),
        table("Limits", dict(list(_LIMITS.items())[: None if known else -1])),
        table("Speed", _speed(plans), *[warning] * (first.deployment.factors is None)),
        *known,
    ]


def _accuracy(plans: Sequence[Plan]) -> TextTable:
    """What is known of the policies at their compressions, each once."""
    rows: dict[tuple[str, tuple[str, ...]], None] = {}
    sources: dict[str, None] = {}
    for plan in plans:
        known = plan.accuracy
        for each in known:
            share = f"{each.share:.2f} ± {each.error:.2f}"
            entry = (share, each.question, each.task, each.model)
            rows[f"{each.policy} {each.compression:g}x", entry] = None
            sources[each.source] = None
        if not known and not plan.keeps_all:
            rows[plan.policy, ("not measured", "", "", "")] = None
    columns = ("of full", "question", "task, tokens", "model")
    notes = (
        "Share of the full cache's mean score. Of another model, compression or length it is a hint: `winnow eval` and "
        "`winnow tune` measure.",
        *([f"Sources: {', '.join(sources)}."] if sources else []),
    )
    return TextTable("Accuracy, where it was measured", "", columns, tuple(rows), notes, (1, 2, 3))


def _label(plan: Plan, plans: Sequence[Plan]) -> str:
    deployment = plan.deployment
    device = f"{deployment.gpus} x " * (deployment.gpus > 1) + deployment.hardware.name
    policies = {each.policy for each in plans}
    return f"{device}, {plan.policy}" if len(policies) > 1 else device


def _memory(plans: Sequence[Plan]) -> dict[str, Callable[[Plan], str]]:
    deployment = plans[0].deployment
    tier, offloads = deployment.layout.value_tier, deployment.cache.kv_offloading_size
    rows: dict[str, Callable[[Plan], Any]] = {
        "device memory, usable": lambda p: p.deployment.usable_bytes,
        "weights": lambda p: p.deployment.weight_bytes,
        "activations (estimate)": lambda p: p.deployment.activation_bytes * p.deployment.gpus,
        "left for KVs": lambda p: p.deployment.kv_room,
        "KVs per token": lambda p: p.deployment.kv_token_bytes,
        "states per request": lambda p: p.deployment.layout.state_bytes,
        "KVs per request": lambda p: p.to_json()["kv_bytes_per_request"],
        "  at its peak": lambda p: p.to_json()["kv_bytes_per_request_peak"],
        "requests in the host tier": lambda p: str(p.to_json()["host_requests"]),
        "values of the batch on the tier": lambda p: p.to_json()["tier_bytes"],
        "batch": lambda p: str(p.batch),
        "KVs of the batch": lambda p: p.to_json()["kv_bytes"],
        "kv_memory for it": lambda p: p.to_json()["cache_bytes"],
        "fits": lambda p: "yes" if p.fits else "no",
    }
    absent = {
        "states per request": not deployment.layout.state_bytes,
        "requests in the host tier": not offloads,
        "values of the batch on the tier": tier is None,
    }

    def shown(read: Callable[[Plan], Any]) -> Callable[[Plan], str]:
        return lambda plan: value if isinstance(value := read(plan), str) else format_bytes(value)

    return {name: shown(read) for name, read in rows.items() if not absent.get(name)}


def _number(value: float | None, form: str = "d") -> str:
    return "none" if value is None else format(value, form)


_LIMITS: Mapping[str, Callable[[Plan], str | None]] = {
    "largest batch": lambda p: _number(p.largest_batch),
    "longest context at the batch": lambda p: _number(p.longest_context),
    "fewest devices for the batch": lambda p: _number(p.fewest_gpus),
    "smaller KVs would bring": kv_pressure,
    "compression for the batch": lambda p: _number(p.compression, ".2f"),
    "evict within the prompt": evict_within_prompt,
}


def _speed(plans: Sequence[Plan]) -> dict[str, Callable[[Plan], str | None]]:
    full = {p.deployment.hardware.name: p.performance for p in plans if p.keeps_all}
    rate = plans[0].request_rate

    def timed(read: Callable[[Performance], str | None]) -> Callable[[Plan], str | None]:
        return lambda plan: None if plan.performance is None else read(plan.performance)

    def beside_full(plan: Plan) -> str | None:
        """Tokens per second as a part of the full cache's on the same device, which a replay may halve."""
        own, whole = plan.performance, full.get(plan.deployment.hardware.name)
        if own is None or whole is None or not whole.output_rate:
            return None
        return f"{own.output_rate / whole.output_rate:.2f}x"

    def devices(plan: Plan) -> int | None:
        return None if plan.replicas is None else plan.replicas * plan.deployment.gpus

    def price(plan: Plan) -> float | None:
        count, each = devices(plan), plan.deployment.price
        return None if count is None or each is None else count * each

    replays = any(resolve_policy(p.deployment.eviction).policy.score.replay is not None for p in plans)
    rows: dict[str, Callable[[Plan], str | None]] = {
        f"prompt{', its replay included' * replays}, s": timed(lambda p: f"{p.prefill_seconds:.3f}"),
        "step, ms": timed(lambda p: f"{p.step_seconds * 1e3:.2f}"),
        "the batch's prompts and its steps, s": lambda p: (
            None if p.performance is None else "{:.1f} + {:.1f}".format(*_phases(p))
        ),
        "new tokens/s": timed(lambda p: f"{p.output_rate:.1f}"),
    }
    if not all(plan.keeps_all for plan in plans):
        rows["  to the full cache's"] = beside_full
    rows |= {
        "a step waits for": timed(lambda p: p.binds),
        "a prompt waits for": timed(lambda p: p.prefill_binds),
        "throughput is bound by": binds,
    }
    if any(plan.performance is not None and plan.performance.cost is not None for plan in plans):
        rows["cost of 1M new tokens"] = timed(lambda p: None if p.cost is None else f"{p.cost:.2f}")
    if rate is not None:
        rows[f"replicas for {rate:g} requests/s"] = lambda p: None if p.replicas is None else str(p.replicas)
        rows["  their devices"] = lambda p: None if (count := devices(p)) is None else str(count)
        if any(map(price, plans)):
            rows["  their price for an hour"] = lambda p: (
                None if (each := price(p)) is None else f"{each:.2f}"
            )
    return rows
