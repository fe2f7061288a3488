"""Sampling parameters of a task of lm_eval."""

from collections.abc import Mapping
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from winnow.errors import EvaluationError
from winnow.sampling import SamplingParams

_SAMPLED = ("top_p", "top_k", "min_p", "seed")
_ALWAYS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos")

# Arguments of transformers' and vLLM's generation that Winnow does not have, each with the value at which they change
# nothing: there they are taken. null is no value, so it is taken too.
_NEUTRAL: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "n": 1,
    "best_of": 1,
    "use_beam_search": False,
    "early_stopping": False,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "token_healing": False,
    "watermarking_config": None,
    "stop_strings": None,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
    "return_dict_in_generate": False,
}
# Whatever they say, the answer is the same.
_IMMATERIAL = frozenset(
    ("use_cache", "cache_implementation", "low_memory", "pad_token_id", "synced_gpus", "prefill_chunk_size")
)


def sampling_for(asked: Mapping[str, Any], default_max_tokens: int, **own: Any) -> SamplingParams:
    """Return sampling parameters for `generation_kwargs` of a task.

    Args:
        asked: `until`, `max_gen_toks` and its other names, `do_sample`, `temperature`,
            sampling parameters under their names in `SamplingParams`, and what transformers' and vLLM's generation know
            besides, at the value that changes nothing. null means left out.
        default_max_tokens: where the task says nothing.
        own: further fields of `SamplingParams`.

    Raises:
        EvaluationError: something is asked for that Winnow does not have.
        InvalidRequestError: a value is out of range.
    """
    given = _normalized(
        {name: value for name, value in asked.items() if value is not None}, default_max_tokens
    )
    until = [each for each in given.pop("until") if each]
    values = {"max_tokens": given.pop("max_gen_toks"), "temperature": given.pop("temperature", 0.0)}
    if not given.pop("do_sample"):
        values["temperature"] = 0.0
    taken = _ALWAYS if values["temperature"] == 0 else _SAMPLED + _ALWAYS
    values |= {name: given[name] for name in taken if name in given}
    unknown = {name: given[name] for name in given.keys() - {*_SAMPLED, *_ALWAYS, *_IMMATERIAL}}
    _check_neutral(unknown)
    return SamplingParams(stop=until, **values, **own)


def _normalized(asked: Mapping[str, Any], default_max_tokens: int) -> dict[str, Any]:
    """Return the arguments with lm_eval's own reading of aliases and defaults."""
    try:
        return dict(normalize_gen_kwargs(dict(asked), default_max_tokens))
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"generation_kwargs hold what is no number: {error}") from None


def _check_neutral(unknown: Mapping[str, Any]) -> None:
    """Raise EvaluationError if one of these arguments would change an answer, or is not known at all."""
    wrong = sorted(name for name in unknown if name not in _NEUTRAL or unknown[name] != _NEUTRAL[name])
    if not wrong:
        return
    only = [
        f"{name} only at {str(_NEUTRAL[name]).lower()}, got {unknown[name]!r}"
        for name in wrong
        if name in _NEUTRAL and _NEUTRAL[name] is not None
    ]
    known = ", ".join(("until", "max_gen_toks", "do_sample", "temperature", *_SAMPLED, *_ALWAYS))
    raise EvaluationError(
        f"generation_kwargs {', '.join(wrong)} are not served"
        + (f" ({'; '.join(only)})" if only else "")
        + f"; known: {known}"
    )
