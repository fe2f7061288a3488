"""A model on hardware: how its memory is shared out, and what follows for batches, contexts, speed and cost."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from winnow.cache import BlockCount, BlockKind, CacheLayout, CacheSize
from winnow.config import CacheConfig, EvictionConfig, SchedulerConfig
from winnow.errors import CapacityError, ConfigError, InvalidRequestError
from winnow.eviction import SequenceEviction, resolve_policy
from winnow.models.model.kv_layout import configured_layout
from winnow.values.checks import check_integer, check_number
from winnow.values.units import format_bytes
from winnow_lab.plan.hardware import Hardware
from winnow_lab.plan.models import DTYPE_BYTES, ModelShape
from winnow_lab.plan.occupancy import (
    Held,
    Request,
    bind_policy,
    cache_bytes,
    has_bias,
    held_blocks,
    num_accumulators,
)
from winnow_lab.plan.step_time import Factors, StepTimes, StepWork, TierTraffic, usual_factors

_MOST_TOKENS = 2**24
_MOST_GPUS = 4096
_ACTIVATIONS = 12
"""Tensors of the hidden size that live at once while a layer is computed, about: its input, MLP and output."""
_LINEAR_BYTES = {
    "int8": 1.0,
    "q8_0": 1.0 + 2.0 / 32,
    "q4_0": 0.5 + 2.0 / 32,
    "fp8": 1.0,
    "int4": 0.5 + 4.0 / 128,
}
"""Bytes of a weight, with its share of a scale: float16 for 32 of q8_0, beside a zero, for 128 of int4."""


def largest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` to `high` for which something holds that holds for `low` and ends once."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class Deployment:
    """A model on some devices, with its weights and KVs spread evenly over them.

    Attributes:
        dtype: of weights and, unless `cache` says otherwise, of KVs; auto: on a CPU as the engine
            takes it, else the model's own. Processors of data sheets multiply bfloat16.
        weight_bits: bits of one weight, for quantized ones; None: those of `dtype`.
        cache: how KVs are stored and in what blocks; its amounts of memory are not looked at.
        linear_dtype: `weight_dtype` of the engine, in which linear layers keep theirs, and an embedding that only looks
            rows up does not.
        utilization: part of the devices' memory that may be used.
        price: of one device for an hour, in any currency; None: unknown.
        factors: calibrated ones of step times; None: those usual on such hardware.
    """

    model: ModelShape
    hardware: Hardware
    gpus: int = 1
    dtype: str = "auto"
    weight_bits: float | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    utilization: float = 0.9
    price: float | None = None
    factors: Factors | None = None
    linear_dtype: str = "auto"

    def __post_init__(self) -> None:
        check_integer("gpus", self.gpus, 1, _MOST_GPUS)
        check_number("utilization", self.utilization, 0.01, 1.0)
        if self.linear_dtype not in ("auto", *_LINEAR_BYTES):
            known = ", ".join(_LINEAR_BYTES)
            raise ConfigError(f"linear_dtype must be one of auto, {known}, got {self.linear_dtype!r}")
        if self.linear_dtype != "auto" and self.weight_bits is not None:
            raise ConfigError(
                f"weight_bits must be left out beside {self.linear_dtype} weights, got {self.weight_bits}"
            )
        if self.weight_bits is not None:
            check_number("weight_bits", self.weight_bits, 1.0, 32.0)
        if self.price is not None:
            check_number("price", self.price, 0.0)
        if self.dtype not in ("auto", *DTYPE_BYTES):
            raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        resolve_policy(self.eviction)

    @property
    def weight_dtype(self) -> str:
        """`dtype`, with auto resolved as the engine does."""
        if self.dtype != "auto":
            return self.dtype
        if self.hardware.kind != "cpu":
            return self.model.dtype
        from winnow.models.load.automatic import cpu_dtype

        isa = None if self.hardware.measured else "avx512_bf16"
        return cpu_dtype(self.model.stored_bytes, self.model.dtype, isa=isa)

    @property
    def keeps_all(self) -> bool:
        return resolve_policy(self.eviction).policy.when.never

    @cached_property
    def layout(self) -> CacheLayout:
        model, chunk = self.model, self.scheduler.prefill_chunk
        return configured_layout(
            self.cache,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.weight_dtype,
            num_accumulators=num_accumulators(self.eviction),
            windows=model.windows,
            chunk=None if chunk is None else min(chunk, self.scheduler.max_num_batched_tokens),
            bias=has_bias(self.eviction),
            state_bytes=model.state_bytes(self.weight_dtype),
            shapes=model.shapes,
            latent=model.latent,
        )

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """All weights, in all devices together."""
        model, wide = self.model, DTYPE_BYTES[self.weight_dtype]
        if self.linear_dtype != "auto":
            kept = model.lookup_params
            return round(_LINEAR_BYTES[self.linear_dtype] * (model.num_params - kept)) + wide * kept
        return round(model.num_params * (self.weight_bits or 8 * wide) / 8)

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in blocks, over all layers and heads; but for values on a tier."""
        return sum(rows * kind.slot_bytes for rows, kind in self._rows_by_kind) - self.far_token_bytes

    @property
    def far_token_bytes(self) -> int:
        """Bytes of one token's values that lie on a value tier, or of its KVs."""
        return sum(rows * kind.tier_slot_bytes for rows, kind in self._rows_by_kind)

    @property
    def _rows_by_kind(self) -> list[tuple[int, BlockKind]]:
        layout = self.layout
        return list(zip(layout.by_kind(layout.even_rows(1)), layout.kinds, strict=True))

    def kinds(self, num_blocks: int) -> BlockCount:
        """Return blocks by kind, where all layers hold as much."""
        return CacheSize.of_blocks(self.layout, num_blocks, 1, self.layout.block_size).by_kind

    @property
    def activation_bytes(self) -> int:
        """Bytes that a step needs beside: hidden states of its tokens and logits of its sequences; an estimate."""
        hidden = _ACTIVATIONS * self.model.hidden_size * DTYPE_BYTES[self.weight_dtype]
        logits = self.model.vocab_size * 4
        scheduler = self.scheduler
        return scheduler.max_num_batched_tokens * hidden + scheduler.max_num_seqs * logits

    @property
    def usable_bytes(self) -> int:
        return int(self.hardware.memory * self.utilization) * self.gpus

    @property
    def kv_room(self) -> int:
        """Bytes left for the KV cache; below 0: the weights do not fit."""
        return self.usable_bytes - self.weight_bytes - self.activation_bytes * self.gpus

    def bound(self, request: Request) -> SequenceEviction | None:
        return bind_policy(self.eviction, request, self.model.max_model_len)

    def held(self, request: Request) -> Held:
        held = held_blocks(self.layout, self.bound(request), request)
        longest = max(self.model.max_model_len or 0, request.computed)
        reserved = {"prompt": request.computed, "max": longest}.get(self.cache.kv_reservation, 0)
        return held.at_least(self.layout.blocks_for(reserved))

    def fits(self, request: Request, batch: int) -> bool:
        """Return whether `batch` such requests fit, on the devices and on the value tier."""
        tier, blocks = self.layout.value_tier, self.held(request).of_batch(batch)
        if tier is not None and tier.size is not None:
            values = self.layout.tier_bytes(self.kinds(blocks))
            if values > tier.size:
                return False
        return self.cache_bytes(request, batch) <= self.kv_room

    def cache_bytes(self, request: Request, batch: int) -> int:
        """Return all memory of a cache for `batch` such requests, tables included."""
        return cache_bytes(self.layout, self.held(request).of_batch(batch), batch, request.computed)

    def host_bytes(self, request: Request) -> int:
        """What a preempted request of that kind takes of the host tier, but for its signals."""
        kvs = self.layout.host_bytes(self.kinds(self.held(request).decoding))
        return kvs + self.layout.state_bytes

    def host_requests(self, request: Request) -> int:
        """Preempted requests of that kind that the host tier holds."""
        return (self.cache.kv_offloading_size or 0) // self.host_bytes(request)

    # -- inverses ------------------------------------------------------------------------------------------------

    def largest_batch(self, request: Request) -> int:
        """Return the largest batch of such requests that fits; 0: none fits."""
        if self.kv_room <= 0:
            return 0
        least = min(kind.device_bytes(self.layout.num_accumulators) for kind in self.layout.kinds)
        most = self.held(request).largest_batch(self.kv_room // least)
        return largest(lambda batch: self.fits(request, batch), 0, most)  # tables take some of the room

    def longest_context(self, batch: int, new_tokens: int) -> int:
        """Return the most tokens of prompt and answer of which `batch` requests fit, beyond the model's limit too."""

        def fits(total: int) -> bool:
            try:
                return self.fits(Request(total - new_tokens, new_tokens), batch)
            except (ConfigError, InvalidRequestError):  # a policy's budget must hold what it protects
                return False

        found = largest(fits, new_tokens, _MOST_TOKENS) if self.kv_room > 0 else new_tokens
        return found if found > new_tokens else 0

    def fewest_gpus(self, request: Request, batch: int) -> int:
        """Return devices of this kind for `batch` such requests; raises CapacityError where 4096 do not suffice."""
        needed = self.weight_bytes + self.cache_bytes(request, batch)
        each = int(self.hardware.memory * self.utilization) - self.activation_bytes
        if each <= 0 or -(-needed // each) > _MOST_GPUS:
            raise CapacityError(
                f"no number of {self.hardware.name} holds {format_bytes(needed)}: {format_bytes(max(each, 0))} of each "
                "are left beside activations"
            )
        return -(-needed // each)

    def needed_compression(self, request: Request, batch: int) -> float | None:
        """Return tokens of the context per KV kept, at which `batch` decoding requests fit; None: at no rate."""
        full = replace(self, eviction=EvictionConfig())
        blocks = batch * full.layout.blocks_for(request.computed)
        # States do not shrink.
        layout = replace(full.layout, state_bytes=0)
        needed = cache_bytes(layout, blocks, batch, request.computed)
        room = self.kv_room - cache_bytes(full.layout, blocks, batch, request.computed) + needed
        if room <= 0:
            return None
        rate = max(needed / room, 1.0)
        return None if rate > 1 and request.computed / rate < self.layout.block_size else rate

    @cached_property
    def traffic(self) -> TierTraffic:
        """Traffic to a value tier and back."""
        tier, model = self.layout.value_tier, self.model
        if tier is None:
            return TierTraffic()
        rows = (self.layout.num_layers - tier.layers) * model.num_kv_heads
        read = tier.top_n * (model.num_query_heads // model.num_kv_heads)
        return TierTraffic(self.far_token_bytes, self.far_token_bytes / rows, rows, read)

    # -- time ----------------------------------------------------------------------------------------------------

    @cached_property
    def times(self) -> StepTimes:
        return StepTimes(
            self.model,
            self.hardware,
            self.weight_bytes,
            self.kv_token_bytes,
            self.gpus,
            self.layout.state_bytes,
            self.factors or usual_factors(self.hardware),
        )

    def kvs_decoding(self, request: Request) -> float:
        """Return KVs per row that a decoding sequence holds, in the middle of its answer."""
        middle = Request(request.prompt_tokens, max(request.new_tokens // 2, 1))
        eviction = self.bound(request)
        if eviction is None or not (eviction.policy.when.after_prefill or eviction.policy.when.prefill_every):
            seen = [middle.computed if window is None else window for window in self.model.windows]
            return sum(min(middle.computed, kvs) for kvs in seen) / len(seen) if seen else middle.computed
        blocks = eviction.decode_blocks(self.layout, middle.computed)
        return min(float(middle.computed), blocks * self.layout.block_size / self.layout.rows_per_seq)

    def performance(self, request: Request, batch: int) -> "Performance":
        """Return the speed with `batch` such requests decoding at all times."""
        decode = self.decode_work(request, batch)
        work = self.prompt_work(request)
        prefill = self.times.seconds(work)
        step_seconds = self.times.seconds(decode)
        # Each request of the batch computes a prompt once in the time in which it decodes its answer.
        cycle = request.new_tokens * step_seconds + batch * prefill
        rate = batch * request.new_tokens / cycle if cycle else 0.0
        cost = None if self.price is None or not rate else self.price * self.gpus / 3600 / rate * 1e6
        binds = self.times.binds(decode), self.times.binds(work)
        return Performance(batch, prefill, step_seconds, rate, *binds, cost)

    def decode_work(self, request: Request, batch: int) -> StepWork:
        """Return a step in the middle of the answers of `batch` such requests, with its share of rounds of eviction."""
        kvs, eviction = self.kvs_decoding(request), self.bound(request)
        work = StepWork.decode(batch, kvs).plus(self.traffic.decode(batch, kvs))
        every = None if eviction is None else eviction.policy.when.decode_every
        if every is not None and eviction is not None and eviction.target < request.computed:
            rounds = batch / every
            work = work.plus(StepWork(round_kvs=rounds * kvs, rounds=rounds))
        return work

    def prompt_work(self, request: Request) -> StepWork:
        """Return a prompt's work alone, up to the first token: its chunks, a replay behind them, rounds of eviction."""
        eviction, scheduler = self.bound(request), self.scheduler
        most = min(scheduler.prefill_chunk or request.prompt_tokens, scheduler.max_num_batched_tokens)
        work, held, start, last_round = StepWork(), 0.0, 0, 0
        while True:
            if eviction is not None and start == eviction.context_len:
                for each in eviction.passes:  # all of its tokens see the whole context
                    for place in range(0, each.length, most):
                        step = StepWork.prefill(min(most, each.length - place), held + place)
                        work = work.plus(step)
            if eviction is not None and eviction.round_due(start, last_round, held):
                work = work.plus(StepWork(round_kvs=held, rounds=1))
                held, last_round = float(eviction.target), start
            if start == request.prompt_tokens:
                return work
            count = min(most, request.prompt_tokens - start)
            if eviction is not None:
                count = min(count, eviction.tokens_to_round(start, last_round, held) or count)
            samples = int(start + count == request.prompt_tokens)
            work = work.plus(StepWork.prefill(count, held, samples)).plus(self.traffic.prefill(count))
            held, start = held + count, start + count

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model.to_json(),
            "hardware": asdict(self.hardware),
            "gpus": self.gpus,
            "dtype": self.weight_dtype,
            "kv_cache_dtype": self.layout.codec_names,
            "kv_group": self.cache.kv_group,
            "kv_wide": str(self.layout.wide) or None,
            "value_tier": None if self.layout.value_tier is None else str(self.layout.value_tier),
            "block_size": self.layout.block_size,
            "utilization": self.utilization,
            "factors": asdict(self.times.factors),
        }


@dataclass(frozen=True)
class Performance:
    """Predicted speed.

    Attributes:
        prefill_seconds: of one prompt alone.
        step_seconds: of a step in which the batch decodes: time per output token.
        output_rate: new tokens per second, prompts computed between.
        binds: what takes longest while decoding; `prefill_binds` while prompts are computed.
        cost: per million new tokens, in the currency of the price; None: no price.
    """

    batch: int
    prefill_seconds: float
    step_seconds: float
    output_rate: float
    binds: str
    prefill_binds: str
    cost: float | None
