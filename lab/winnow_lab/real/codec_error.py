"""What rounding does to keys, values and attention, apart from each other: why a format costs what it costs.

    python -m winnow_lab.real.codec_error -o docs/results

The model reads the first tokens of WikiText-2 once, as transformers computes it. In every layer its keys and values are
encoded and decoded; nothing of that reaches the next layer. Errors are those of a layer alone, means over layers:

keys, values: norm of the error over the norm of what was rounded.
logits: standard deviation over keys of the error of q . k, in nats, what all keys of a query have in common left out,
  which softmax does not see.
output by keys, by values: error of a head's output over its norm, where only the keys or only the values were rounded.

A codec named "centred" rounds keys less their mean over tokens in each head, which no format of Winnow's does: q . c is
the same for all keys of a query, so what attends need not add c again. One named "by channel" rounds keys as KIVI (Liu
et al. 2024) does: 16 keys share a least value and a step in each channel, so that none could be evicted alone.

Of keys, the page says how much of their squared norm is the mean over tokens of a head, and how far the largest channel
stands out: a constant part costs range, and is no information.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from winnow.cache.codec import PairCodec, make_codec
from winnow.config import ModelConfig
from winnow.errors import ConfigError
from winnow.models.load.loader import load_plain_model
from winnow.values.kv_dtype import KVDtype
from winnow_lab.evaluate.wikitext import wikitext
from winnow_lab.real.codec_tables import Codec, read_codecs
from winnow_lab.report.tables import TextTable
from winnow_lab.study import RealModelOptions, Result, flag, run_study

CODECS = (
    *("bfloat16", "fp8_e4m3", "int8", "int4", "int4 rotate=none", "int4 rotate=kv", "int4 group=16"),
    *("int4 group=64", "int4-outlier", "int3", "int2", "int2 rotate=none", "int4 centred", "int2 centred"),
    *("int4 by channel", "int2 by channel"),
)
QUERIES = 32
"""The last queries, whose attention is computed anew."""
_CENTRED = " centred"
_BY_CHANNEL = " by channel"
_NAME = "winnow-codec-error"
Errors = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Options(RealModelOptions):
    tokens: int = flag(1024, least=2 * QUERIES)
    codecs: tuple[str, ...] = flag(CODECS, "semicolons between", parse=read_codecs)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens % 16:
            raise ConfigError(f"--tokens must be a multiple of 16, got {self.tokens}")


class Recorder:
    def __init__(self, codecs: dict[str, PairCodec]) -> None:
        self._codecs = codecs
        self._found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in codecs}
        self._shape: dict[str, list[float]] = defaultdict(list)

    def errors(self) -> Errors:
        """Means over layers, by codec and kind."""
        return {
            name: {kind: fmean(values) for kind, values in kinds.items()}
            for name, kinds in self._found.items()
        }

    def shape(self) -> dict[str, float]:
        return {kind: fmean(values) for kind, values in self._shape.items()}

    def add(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        """One layer: q [1, Hq, T, d], k and v [1, H, T, d]."""
        q, k, v = (each[0].float() for each in (q[:, :, -QUERIES:], k, v))
        for side, x in (("key", k), ("value", v)):
            squares = x.square()
            self._shape[f"{side}_mean_share"].append(
                _share(x.mean(-2).square().sum(-1), squares.sum(-1).mean(-1))
            )
            channels = squares.mean(-2)  # [H, d]
            self._shape[f"{side}_largest_channel"].append(
                float((channels.amax(-1) / channels.mean(-1)).sqrt().mean())
            )
        logits, weights = _attention(q, k, scale)
        output = _mix(weights, v)
        for name, codec in self._codecs.items():
            centre = k.mean(-2, keepdim=True) if name.endswith(_CENTRED) else torch.zeros(())
            near_k, near_v = _round_trip(codec, k - centre, v)
            near_k = near_k + centre
            if name.endswith(_BY_CHANNEL):
                blocks = codec_of(name.replace(_BY_CHANNEL, " group=16"))
                near_k = _round_trip(blocks, k, k.mT)[1].mT
            near_logits, near_weights = _attention(q, near_k, scale)
            error = near_logits - logits  # not a number where a query does not look
            centred = (error - error.nanmean(-1, keepdim=True)).square().nanmean(-1)
            kinds = self._found[name]
            kinds["keys"].append(_relative(near_k, k))
            kinds["values"].append(_relative(near_v, v))
            kinds["logits"].append(float(centred.mean().sqrt()))
            kinds["output_by_keys"].append(_relative(_mix(near_weights, v), output))
            kinds["output_by_values"].append(_relative(_mix(weights, near_v), output))


def measure_errors(
    model: PreTrainedModel, token_ids: Sequence[int], codecs: dict[str, PairCodec]
) -> tuple[Errors, dict[str, float]]:
    """Errors of each codec on a text whose last `QUERIES` tokens are the queries, and what keys and values are like."""
    recorder = Recorder(codecs)
    with torch.inference_mode(), _recording(model, recorder):
        model(torch.tensor([token_ids], device=model.device), use_cache=False)
    return recorder.errors(), recorder.shape()


@contextmanager
def _recording(model: PreTrainedModel, recorder: Recorder) -> Iterator[None]:
    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any) -> Any:
        scaling = given.get("scaling")
        recorder.add(q, k, v, q.shape[-1] ** -0.5 if scaling is None else float(scaling))
        return sdpa_attention_forward(module, q, k, v, mask, **given)

    AttentionInterface.register(_NAME, attend)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before or "sdpa")


def _round_trip(codec: PairCodec, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return codec.keys(codec.encode_keys(k)).float(), codec.values(codec.encode_values(v)).float()


def _attention(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Logits and weights of the last queries, [H, group, Q, T]; logits of later keys are -inf."""
    queries, length = q.shape[-2], k.shape[-2]
    seen = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    logits = (q.unflatten(0, (k.shape[0], -1)) @ k[:, None].mT * scale).masked_fill(~seen, -torch.inf)
    return logits, logits.softmax(-1)


def _mix(weights: Tensor, v: Tensor) -> Tensor:
    return weights @ v[:, None]


def _relative(near: Tensor, exact: Tensor) -> float:
    return float((near - exact).norm() / exact.norm())


def _share(part: Tensor, whole: Tensor) -> float:
    return float((part / whole).mean())


def table(errors: Errors) -> TextTable:
    kinds = ("keys", "values", "logits", "output_by_keys", "output_by_values")
    lines = tuple((name, tuple(f"{found[kind]:.4f}" for kind in kinds)) for name, found in errors.items())
    columns = ("keys", "values", "logits, nats", "output by keys", "output by values")
    return TextTable("Errors of a layer, means over layers", "codec", columns, lines)


def study(options: Options) -> Result:
    loaded = load_plain_model(ModelConfig(options.model, dtype="bfloat16"))
    model: Any = loaded.model
    tokenizer: Any = loaded.tokenizer
    token_ids = tokenizer.encode(wikitext(None), add_special_tokens=False)[: options.tokens]
    errors, shape = measure_errors(model, token_ids, {name: codec_of(name) for name in options.codecs})
    name = Path(options.model).name
    facts = [
        f"Model {name}, bfloat16, {len(token_ids):,} tokens of WikiText-2, the last {QUERIES} as queries.",
        *(
            f"Of {side}s the mean over tokens holds {shape[f'{side}_mean_share']:.0%} of the squared norm, and the "
            f"largest channel is {shape[f'{side}_largest_channel']:.1f} times the root mean square."
            for side in ("key", "value")
        ),
    ]
    numbers = {"model": name, "tokens": len(token_ids), "shape": shape, "errors": errors}
    return Result("What rounding does to attention", [table(errors)], facts, "", numbers, ())


def codec_of(name: str) -> PairCodec:
    options = Codec(name.removesuffix(_CENTRED).removesuffix(_BY_CHANNEL)).options  # all is rounded
    kind = KVDtype.parse(options.pop("kv_cache_dtype"))
    return make_codec(kind, options.get("kv_group"), options.get("kv_rotate", "auto"))


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
