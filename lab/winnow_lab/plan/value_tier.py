"""Performance model of values on the host: that of KCache (arXiv 2404.18057, equations 1 to 4), corrected.

Prefill (1, 2): copying a layer's values out hides behind the next layer's arithmetic if
`(F s + 4 s^2 d) / compute > V s / to_host`, where a token takes F operations beside attention (the paper: 24 d^2, of
which it prints 22), s is the prompt's length, d the hidden size and V the bytes of a token's values in a layer.

Decode (3, 4): fetching `rows` values of each KV head must take less than what is no longer read on the device,
`rows * value / from_host < (s - rows) (value + weights) / bandwidth`. Printed, the left side lacks the 2 bytes of an
element. `rows` is N for each query head of a group. Finding the N largest of s weights is taken to cost nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from winnow.values.units import format_bytes
from winnow.values.value_tier import ValueTier
from winnow_lab.plan.hardware import Hardware
from winnow_lab.plan.models import ModelShape
from winnow_lab.report.tables import TextTable

if TYPE_CHECKING:
    from winnow_lab.plan.plan_tables import Plan

_WEIGHT_BYTES = 2.0


@dataclass(frozen=True)
class TierModel:
    """A decoder's attention, as far as a value tier changes its time.

    Attributes:
        flops_per_token: of a layer, beside attention.
        key_bytes, value_bytes: of one KV.
    """

    num_layers: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    flops_per_token: float
    key_bytes: float
    value_bytes: float

    @classmethod
    def of(cls, model: ModelShape, key_bytes: float, value_bytes: float) -> "TierModel":
        flops = 2.0 * (model.active_params - model.vocab_size * model.hidden_size) / model.num_layers
        heads = model.num_query_heads, model.num_kv_heads
        return cls(model.num_layers, model.hidden_size, *heads, flops, key_bytes, value_bytes)


@dataclass(frozen=True)
class TierGain:
    """Changes by a value tier.

    Attributes:
        hidden: whether copying values out hides behind a prompt's arithmetic; hidden_from: the shortest prompt for
            which it does.
        full_seconds, tiered_seconds: of a step's attention, all layers, without the tier and with it.
        pays_from: tokens from which a step takes less time with the tier; None: at no length.
        moved_bytes: of a token's values that leave the device; kv_bytes: of its KVs.
    """

    hidden: bool
    hidden_from: int
    full_seconds: float
    tiered_seconds: float
    pays_from: int | None
    moved_bytes: float
    kv_bytes: float

    @property
    def pays(self) -> bool:
        return self.tiered_seconds < self.full_seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"pays": self.pays}


def tier_gain(
    model: TierModel, hardware: Hardware, *, layers: int, top_n: int, length: int, batch: int = 1
) -> TierGain:
    """Return what keeping the values of layers from `layers` on apart changes for `batch` sequences of `length` tokens.

    A query head reads `top_n` values of each.
    """
    far = max(model.num_layers - layers, 0)
    full = batch * _attention(model, hardware, length) * model.num_layers
    tiered = batch * (
        _attention(model, hardware, length) * (model.num_layers - far)
        + _selected(model, hardware, top_n, length) * far
    )
    hidden_from = _hidden_from(model, hardware)
    return TierGain(
        hidden=length >= hidden_from,
        hidden_from=hidden_from,
        full_seconds=full,
        tiered_seconds=tiered,
        pays_from=_pays_from(model, hardware, top_n) if far else None,
        moved_bytes=far * model.kv_heads * model.value_bytes,
        kv_bytes=model.num_layers * model.kv_heads * (model.key_bytes + model.value_bytes),
    )


def _attention(model: TierModel, hardware: Hardware, length: float) -> float:
    kvs = model.kv_heads * (model.key_bytes + model.value_bytes)
    weights = 2 * model.query_heads * _WEIGHT_BYTES  # written by the softmax, and read with the values
    return length * (kvs + weights) / hardware.bandwidth


def _selected(model: TierModel, hardware: Hardware, top_n: int, length: float) -> float:
    rows = min(length, top_n * (model.query_heads // model.kv_heads))
    fetched = rows * model.kv_heads * model.value_bytes
    on_device = length * model.kv_heads * model.key_bytes + fetched
    on_device += model.query_heads * _WEIGHT_BYTES * (length + min(top_n, length))
    return on_device / hardware.bandwidth + fetched / hardware.link


def _pays_from(model: TierModel, hardware: Hardware, top_n: int) -> int | None:
    """Return the shortest row from which on a query takes less time with values on the host."""

    def saved(length: float) -> float:
        return _attention(model, hardware, length) - _selected(model, hardware, top_n, length)

    # Up to here all values are fetched, or as many as are chosen; from here on each token saves as much.
    first = float(top_n * (model.query_heads // model.kv_heads))
    slope = saved(2 * first) - saved(first)
    if slope <= 0.0:
        return None
    return math.floor(max(first - saved(first) * first / slope, first)) + 1


def _hidden_from(model: TierModel, hardware: Hardware) -> int:
    """Return the shortest prompt whose arithmetic takes as long as copying a layer's values out."""
    needed = hardware.compute * model.kv_heads * model.value_bytes / hardware.link  # operations a token
    return max(1, math.ceil((needed - model.flops_per_token) / (4 * model.hidden_size)))


def gain_of(plan: "Plan", tier: ValueTier) -> TierGain:
    """Return what a tier changes for the batch of a plan, whose sequences have all their tokens."""
    deployment, request = plan.deployment, plan.request
    kind = deployment.layout.kinds[-1]
    sides = kind.key_fields, kind.value_fields
    key_bytes, value_bytes = (float(sum(field.slot_bytes for field in side)) for side in sides)
    rates = {
        name: getattr(deployment.hardware, name) * deployment.gpus
        for name in ("bandwidth", "compute", "link")
    }
    return tier_gain(
        TierModel.of(deployment.model, key_bytes, value_bytes),
        replace(deployment.hardware, **rates),
        layers=tier.layers,
        top_n=tier.top_n,
        length=request.prompt_tokens + request.new_tokens,
        batch=max(plan.batch, 1),
    )


def tier_table(names: Sequence[str], gains: Sequence[TierGain], tier: ValueTier) -> TextTable:
    rows: dict[str, Callable[[TierGain], str]] = {
        "KVs per token": lambda g: format_bytes(round(g.kv_bytes)),
        "values that leave the device, per token": lambda g: format_bytes(round(g.moved_bytes)),
        "copying out hides in prompts from": lambda g: f"{g.hidden_from} tokens",
        "attention of a step, without, ms": lambda g: f"{g.full_seconds * 1e3:.3f}",
        "attention of a step, with, ms": lambda g: f"{g.tiered_seconds * 1e3:.3f}",
        "pays from": lambda g: "never" if g.pays_from is None else f"{g.pays_from} tokens",
    }
    title = f"Value tier {tier} (KCache, eq. 1-4 corrected)"
    note = "By data sheet: links at full rate, and finding the largest weights costs nothing."
    found = TextTable.of(title, "", zip(names, gains, strict=True), rows, [note])
    return found.transposed()
