"""Time of a step: work over what the hardware can do, times factors that a calibration fits.

A step's time is taken as a sum, each part an ideal time of the hardware times its factor: products of matrices,
reading the weights, reading KVs; and constants per step, layer, sequence, token, round and byte over the link. The
sum is linear in the factors, so that they can be fitted to whole runs. What binds is the largest ideal time.
"""

from dataclasses import dataclass, fields
from functools import cached_property

from winnow_lab.plan.hardware import Hardware
from winnow_lab.plan.models import ModelShape


@dataclass(frozen=True)
class StepWork:
    """Work of a step, or of many steps together.

    Attributes:
        tokens: computed.
        sequences: that take part; over many steps, the sum.
        kv_tokens: KVs per row that attention reads, summed over sequences.
        attended: pairs of query and KV per query head, summed over tokens.
        samples: tokens sampled, whose logits are computed.
        round_kvs: KVs per row that rounds of eviction ranked.
        link_bytes: between host and device.
        prompt_tokens: of the tokens, those computed several of a sequence at a time.
    """

    steps: float = 0.0
    tokens: float = 0.0
    sequences: float = 0.0
    kv_tokens: float = 0.0
    attended: float = 0.0
    samples: float = 0.0
    round_kvs: float = 0.0
    rounds: float = 0.0
    link_bytes: float = 0.0
    prompt_tokens: float = 0.0

    def plus(self, other: "StepWork") -> "StepWork":
        return StepWork(
            self.steps + other.steps,
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.kv_tokens + other.kv_tokens,
            self.attended + other.attended,
            self.samples + other.samples,
            self.round_kvs + other.round_kvs,
            self.rounds + other.rounds,
            self.link_bytes + other.link_bytes,
            self.prompt_tokens + other.prompt_tokens,
        )

    def times(self, factor: float) -> "StepWork":
        return StepWork(**{each.name: factor * getattr(self, each.name) for each in fields(self)})

    def minus(self, other: "StepWork") -> "StepWork":
        return self.plus(other.times(-1.0))

    @classmethod
    def decode(cls, batch: int, kvs: float) -> "StepWork":
        """Return one step in which `batch` sequences of `kvs` KVs a row each compute a token."""
        return cls(1, batch, batch, batch * kvs, batch * kvs, batch)

    @classmethod
    def prefill(cls, count: int, kvs: float, samples: int = 0) -> "StepWork":
        """Return one step in which a sequence that holds `kvs` KVs a row computes `count` tokens of its prompt."""
        attended = count * (kvs + count / 2)
        return cls(1, count, 1, kvs + count, attended, samples, prompt_tokens=count if count > 1 else 0)


@dataclass(frozen=True)
class TierTraffic:
    """Bytes that a value tier moves over the link; by default, where there is none, nothing.

    Attributes:
        token_bytes: of a token's values in all rows on the tier.
        value_bytes: of one value; rows: that lie on the tier.
        read: values that a decoding token reads of a row, where the query heads of a group choose apart.
    """

    token_bytes: float = 0.0
    value_bytes: float = 0.0
    rows: int = 0
    read: int = 0

    def decode(self, sequences: float, kvs: float) -> StepWork:
        """Return the work of a token each of sequences with `kvs` KVs a row, which leaves values and fetches some."""
        fetched = self.rows * min(self.read, kvs) * self.value_bytes
        return StepWork(link_bytes=sequences * (self.token_bytes + fetched))

    def prefill(self, tokens: float) -> StepWork:
        """Return the work of tokens of prompts, which leave their values."""
        return StepWork(link_bytes=tokens * self.token_bytes)


@dataclass(frozen=True)
class Factors:
    """Factors of the ideal times, and constants on top.

    The defaults are usual ones of GPU engines: products, those of attention too, reach 45 % of the data sheet, reading
    weights 70 % and KVs 53 %; the constants are of the order of launch times. An uncalibrated prediction is off by
    tens of percent.

    Attributes:
        layer, sequence, step: seconds per each of a step, and per step.
        ranked: times of reading the KVs that a round of eviction ranks.
        prompt: of products of prompts' tokens beside `compute`: on a CPU those of few tokens hide behind the weights.
    """

    compute: float = 2.2
    attention: float = 2.2
    weights: float = 1.4
    kv: float = 1.9
    link: float = 1.25
    layer: float = 12e-6
    sequence: float = 4e-6
    step: float = 130e-6
    ranked: float = 4.0
    prompt: float = 0.0


CPU_FACTORS = Factors(
    0.8, 1.3, 1.05, 0.9, 1.0, layer=10e-6, sequence=5e-6, step=100e-6, ranked=4.2, prompt=0.2
)
"""Factors of Winnow's kernels on a CPU whose `Hardware` was measured.

A fit to eight runs of W1's shape, in units of what `this_machine` measures there. Products of prompts are as
fast as linear layers alone; those of few tokens hide behind the weights in part.
"""


def usual_factors(hardware: Hardware) -> Factors:
    """Factors for hardware on which nothing was calibrated."""
    return CPU_FACTORS if hardware.kind == "cpu" else Factors()


PARTS = tuple(each.name for each in fields(Factors))


@dataclass(frozen=True)
class StepTimes:
    """The time of a step on some hardware, with the model's weights spread evenly over `gpus` devices.

    Attributes:
        weight_bytes: of all devices together.
        kv_token_bytes: keys and values of one token, over all rows.
        state_bytes: that layers keep of a sequence beside them; a step reads and writes them.
    """

    model: ModelShape
    hardware: Hardware
    weight_bytes: float
    kv_token_bytes: float
    gpus: int = 1
    state_bytes: float = 0.0
    factors: Factors = Factors()

    def ideal(self, work: StepWork) -> dict[str, float]:
        """Return seconds by part of `Factors`: what its factor multiplies; of the constants, how many there are."""
        model, hardware = self.model, self.hardware
        head = model.hidden_size * model.vocab_size  # computed for tokens that sample alone
        layers = 2.0 * max(model.active_params - head, 0)
        flops = layers * work.tokens + 2.0 * head * work.samples
        attention = 4.0 * model.num_layers * model.num_query_heads * model.head_dim * work.attended
        bandwidth = hardware.bandwidth * self.gpus
        return {
            "compute": flops / (hardware.compute * self.gpus),
            "attention": attention / (hardware.compute * self.gpus),
            "weights": self.ideal_weights(work),
            "kv": (work.kv_tokens * self.kv_token_bytes + work.sequences * 2 * self.state_bytes) / bandwidth,
            "link": work.link_bytes / (hardware.link * self.gpus),
            "layer": work.steps * (model.depth or model.num_layers),
            "sequence": work.sequences,
            "step": work.steps,
            "ranked": work.round_kvs * self.kv_token_bytes / bandwidth,
            "prompt": layers * work.prompt_tokens / (hardware.compute * self.gpus),
        }

    def seconds(self, work: StepWork) -> float:
        weights = self.factors.weights * self.ideal_weights(work)
        return weights + sum([seconds * getattr(work, name) for name, seconds in self._rates if seconds])

    @cached_property
    def _rates(self) -> list[tuple[str, float]]:
        """Seconds of one of each field of `StepWork`, all parts together but for the weights."""
        rates = []
        for each in fields(StepWork):
            ideal = self.ideal(StepWork(**{each.name: 1.0}))
            parts = [part for part in PARTS if part != "weights"]
            rates.append((each.name, sum(getattr(self.factors, part) * ideal[part] for part in parts)))
        return rates

    def binds(self, work: StepWork) -> str:
        """Return what takes longest: compute, that of attention, bandwidth (weights, KVs), link, rounds or overhead."""
        times = {part: getattr(self.factors, part) * value for part, value in self.ideal(work).items()}
        times["compute"] += times.pop("prompt")
        overhead = sum(times.pop(part) for part in ("layer", "sequence", "step"))
        names = {
            "compute": "compute",
            "attention": "compute (attention)",
            "weights": "bandwidth (weights)",
            "kv": "bandwidth (KVs)",
            "link": "link to the host",
            "ranked": "rounds of eviction",
        }
        most = max(times, key=lambda part: times[part])
        return names[most] if times[most] >= overhead else "overhead of a step"

    def ideal_weights(self, work: StepWork) -> float:
        """Return seconds to read the weights in a step; of a mixture, those of experts that tokens are sent to."""
        if not work.steps:
            return 0.0
        model = self.model
        read = model.num_params - model.lookup_params
        touched = 1.0
        if model.active_params < read:
            touched -= (1 - model.active_params / read) ** max(work.tokens / work.steps, 1.0)
        seconds = self.weight_bytes * read / model.num_params / (self.hardware.bandwidth * self.gpus)
        return work.steps * seconds * touched
