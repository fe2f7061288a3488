"""Training data of a predictor: KVzip's scores of texts with the features of their tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from winnow.chat import apply_template
from winnow.eviction import AdaptiveRows, EvictionPolicy, Keep, LayerRows, Needs, Replay, Scorer, When
from winnow.eviction.predictor import PredictorSource, TokenScorer, features
from winnow.eviction.scores.reconstruction import Reconstruction
from winnow.llm import LLM
from winnow.sampling import SamplingParams

SINKS = 4
"""Number of first KVs of a row, which policies protect: excluded from training and evaluation."""


@dataclass(frozen=True)
class Collected:
    """The KVs of T tokens of a text, in their order.

    Attributes:
        features: of the tokens in each layer (`winnow.eviction.predictor.features`), bfloat16 [L, T, D].
        scores: of the replay, float32 [L, H, T].
        probe: keys that identify the model, float32 [L, H, d].
    """

    features: Tensor
    scores: Tensor
    probe: Tensor

    @property
    def num_kvs(self) -> int:
        return self.scores.shape[-1]


@dataclass(frozen=True, eq=False)
class Recorder(PredictorSource):
    """Recorder that stands in a predictor's place and takes the features that it is given; a replay sets the scores."""

    features: dict[int, list[Tensor]] = field(default_factory=dict)
    scores: list[Tensor] = field(default_factory=list)
    probes: list[Tensor] = field(default_factory=list)

    def open(self, locate: Callable[[], Path], probe: Tensor, like: Tensor) -> TokenScorer:
        self.probes.append(probe)
        return self

    def predict(self, layer: int, inputs: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Record the features. Returns zeros, from which a replay raises scores."""
        known = features(inputs, keys, values).to("cpu", torch.bfloat16)
        self.features.setdefault(layer, []).append(known)
        return inputs.new_zeros(keys.shape[:2], dtype=torch.float32)

    def collected(self, skip: int) -> Collected:
        """Stack all layers, without the first `skip` KVs of each row."""
        scores = torch.stack(self.scores)
        end = scores.shape[-1]
        known = torch.stack([torch.cat(self.features[layer])[:end] for layer in range(len(scores))])
        self.features.clear()  # the engine keeps the recorder
        return Collected(known[:, skip:].contiguous(), scores[..., skip:].contiguous(), self.probes[0])


@dataclass(frozen=True)
class _Recorded(Scorer):
    """A replay's score that is recorded."""

    num_accumulators = 1
    recorder: Recorder = field(default_factory=Recorder, compare=False)
    inner: Reconstruction = field(default_factory=Reconstruction)

    @property
    def needs(self) -> Needs:
        return Needs(predictor=self.recorder)

    @property
    def replay(self) -> Replay:
        return self.inner.replay

    def score(self, rows: LayerRows) -> Tensor:
        score = self.inner.score(rows)
        # Before their first round rows are in the order of positions.
        self.recorder.scores.append(score[0, :, : int(rows.length[0].min())].cpu().clone())
        return score


def collect(llm: LLM, text: str, *, chat: bool) -> Collected:
    """Prefill a text, replay it and return its scores with the features of its tokens.

    Args:
        chat: put the text into the model's chat template.

    Raises:
        InvalidRequestError: the model does not support replays, or the text does not fit into context or KV memory.
    """
    assert llm.tokenizer is not None, "checked by the caller"
    if not chat:
        token_ids = llm.tokenizer.encode(text)
        return collect_tokens(llm, token_ids, len(token_ids))
    prompt = apply_template(llm.tokenizer, [{"role": "user", "content": text}])
    return collect_tokens(llm, prompt.token_ids, len(prompt.token_ids) - prompt.template_tail)


def collect_tokens(llm: LLM, token_ids: Sequence[int], context: int) -> Collected:
    """Return `collect` for token ids, of which the first `context` are the text."""
    recorder = Recorder(uuid4().hex)  # a name of its own, so that no prefix is shared and all inputs are seen
    policy = EvictionPolicy(_Recorded(recorder), AdaptiveRows(), Keep(sinks=SINKS), When(after_prefill=True))
    # Any budget below the context triggers the round.
    params = SamplingParams(
        temperature=0,
        max_tokens=2,
        eviction=policy,
        kv_budget=context - 1,
        context_tokens=context,
        ignore_eos=True,
    )
    [output] = llm.generate(list(token_ids), params)
    output.raise_for_error()
    return recorder.collected(SINKS)


def joined(texts: Sequence[Collected], layer: int) -> tuple[Tensor, Tensor]:
    """Return features and scores of a layer over all texts: float32 [T, D] and [T, H]."""
    return (
        torch.cat([text.features[layer] for text in texts]).float(),
        torch.cat([text.scores[layer].T for text in texts]),
    )
