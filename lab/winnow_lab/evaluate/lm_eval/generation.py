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
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "n", "best_of"), 1),
    **dict.fromkeys(("length_penalty", "guidance_scale", "typical_p", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha", "epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0
    ),
    **dict.fromkeys(
        ("use_beam_search", "early_stopping", "renormalize_logits", "remove_invalid_values"), False
    ),
    **dict.fromkeys(("token_healing", "output_attentions", "output_hidden_states", "output_scores"), False),
    **dict.fromkeys(("output_logits", "return_dict_in_generate"), False),
    **dict.fromkeys(("top_h", "max_time", "bad_words_ids", "force_words_ids", "constraints"), None),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "sequence_bias", "stop_strings"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "watermarking_config"), None),
    "exponential_decay_length_penalty": None,
}
# Whatever they say, the answer is the same.
_IMMATERIAL = frozenset(
    ("use_cache", "cache_implementation", "low_memory", "pad_token_id", "synced_gpus", "prefill_chunk_size")
)


def sampling_for(asked: Mapping[str, Any], default_max_tokens: int, **own: Any) -> SamplingParams:
    """Sampling parameters for `generation_kwargs` of a task.

    Args:
        asked: `until`, `max_gen_toks` and its other names, `do_sample`, `temperature`,
            sampling parameters under their names in `SamplingParams`, and what transformers' and vLLM's generation know
            besides, at the value that changes nothing. null means left out.
    """
    taken = {name: value for name, value in asked.items() if value is not None}
    try:
        given = dict(normalize_gen_kwargs(taken, default_max_tokens))
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"generation_kwargs hold what is no number: {error}") from None
    until = [each for each in given.pop("until") if each]
    values = {"max_tokens": given.pop("max_gen_toks"), "temperature": given.pop("temperature", 0.0)}
    if not given.pop("do_sample"):
        values["temperature"] = 0.0
    used = _ALWAYS if values["temperature"] == 0 else _SAMPLED + _ALWAYS
    values |= {name: given[name] for name in used if name in given}
    _check_neutral({name: given[name] for name in given.keys() - {*_SAMPLED, *_ALWAYS, *_IMMATERIAL}})
    return SamplingParams(stop=until, **values, **own)


def _check_neutral(unknown: Mapping[str, Any]) -> None:
    """Raise EvaluationError if one of these arguments would change an answer, or is not known at all."""
    wrong = sorted(name for name in unknown if name not in _NEUTRAL or unknown[name] != _NEUTRAL[name])
    if not wrong:
        return
    only = [
        f"{name} only at {str(_NEUTRAL[name]).lower()}, got {unknown[name]!r}"
        for name in wrong
        if _NEUTRAL.get(name) is not None
    ]
    known = ", ".join(("until", "max_gen_toks", "do_sample", "temperature", *_SAMPLED, *_ALWAYS))
    hint = f" ({'; '.join(only)})" if only else ""
    raise EvaluationError(f"generation_kwargs {', '.join(wrong)} are not served{hint}; known: {known}")
