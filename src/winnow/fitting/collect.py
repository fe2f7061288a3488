"""KVzip's scores of texts, beside what the cache stores of each KV: what a predictor learns from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from winnow.chat import apply_template
from winnow.eviction import AdaptiveRows, EvictionPolicy, Keep, LayerRows, Needs, Replay, Score, When
from winnow.eviction.scores.keys import key_difference
from winnow.eviction.scores.reconstruction import Reconstruction
from winnow.llm import LLM
from winnow.sampling import SamplingParams


@dataclass(frozen=True)
class Collected:
    """What is known of the KVs of one text, T of them in each row, in the order of positions.

    Attributes:
        keys: before their rotation, bfloat16 [L, H, T, d].
        values: bfloat16 [L, H, T, d].
        scores: the replay's, float32 [L, H, T].
        baseline: KeyDiff's, float32 [L, H, T], for comparison.
        probe: keys by which the model is known again, float32 [L, H, d].
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    baseline: Tensor
    probe: Tensor

    @property
    def num_kvs(self) -> int:
        return self.scores.shape[-1]


@dataclass
class Recorder:
    """Takes down the rows of a round, layer by layer."""

    layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    probe: Tensor = field(default_factory=lambda: torch.empty(0))

    def take(self, rows: LayerRows, score: Tensor) -> None:
        count = int(rows.length[0].min())
        # Rows are in the order of positions before their first round.
        parts = (rows.unrotated_keys(), rows.values(), score, key_difference(rows))
        keys, values, scores, baseline = (part[0, :, :count].clone().cpu() for part in parts)
        self.layers.append((keys.bfloat16(), values.bfloat16(), scores, baseline))
        self.probe = rows.key_probe()

    def collected(self, skip: int) -> Collected:
        """All layers together, without the first `skip` KVs of each row."""
        keys, values, scores, baseline = (
            torch.stack(part)[:, :, skip:].contiguous() for part in zip(*self.layers, strict=True)
        )
        return Collected(keys, values, scores, baseline, self.probe)


@dataclass(frozen=True)
class _Recorded(Score):
    """A replay's score, taken down."""

    num_accumulators = 1
    recorder: Recorder = field(default_factory=Recorder, compare=False)
    inner: Reconstruction = field(default_factory=Reconstruction)

    @property
    def needs(self) -> Needs:
        return Needs(rotation=True)

    @property
    def replay(self) -> Replay:
        return self.inner.replay

    def worth(self, rows: LayerRows) -> Tensor:
        score = self.inner.worth(rows)
        self.recorder.take(rows, score)
        return score


SINKS = 4
"""First KVs of a row that policies keep anyway: neither learnt from nor judged."""


def collect(llm: LLM, text: str, *, chat: bool) -> Collected:
    """Compute a text, repeat it, and return what that says of its KVs; within the model's chat template or without.

    Raises:
        InvalidRequestError: the model does not allow it, or the text does not fit into context or KV memory.
    """
    assert llm.tokenizer is not None, "checked by who reads texts"
    if not chat:
        token_ids = llm.tokenizer.encode(text)
        return collect_tokens(llm, token_ids, len(token_ids))
    prompt = apply_template(llm.tokenizer, [{"role": "user", "content": text}])
    return collect_tokens(llm, prompt.token_ids, len(prompt.token_ids) - prompt.template_tail)


def collect_tokens(llm: LLM, token_ids: Sequence[int], context: int) -> Collected:
    """The same for tokens, of which the first `context` are the text. Raises as `collect`."""
    recorder = Recorder()
    policy = EvictionPolicy(_Recorded(recorder), AdaptiveRows(), Keep(sinks=SINKS), When(after_prefill=True))
    # Any budget below the context has a round, and the round is all that is wanted.
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


def joined(texts: Sequence[Collected], layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and scores of a layer over all texts: float32 [H, T, d] twice, and [H, T]."""
    keys, values, scores = (
        torch.cat([getattr(text, name)[layer] for text in texts], dim=1).float()
        for name in ("keys", "values", "scores")
    )
    return keys, values, scores
