"""What a task of lm_eval asks of generation, as sampling parameters."""

from collections.abc import Mapping
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from winnow.errors import EvaluationError
from winnow.sampling import SamplingParams

_SAMPLED = ("top_p", "top_k", "min_p", "seed")
_ALWAYS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos")


def sampling_for(asked: Mapping[str, Any], default_max_tokens: int, **own: Any) -> SamplingParams:
    """Sampling parameters for `generation_kwargs` of a task.

    Args:
        asked: `until`, `max_gen_toks` and its other names, `do_sample`, `temperature`,
            and sampling parameters under their names in `SamplingParams`.
        default_max_tokens: where the task says nothing.
        own: further fields of `SamplingParams`.

    Raises:
        EvaluationError: something is asked for that Winnow does not have.
        InvalidRequestError: a value is out of range.
    """
    told: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), default_max_tokens))
    until = [each for each in told.pop("until") if each]
    values = {"max_tokens": told.pop("max_gen_toks"), "temperature": told.pop("temperature", 0.0)}
    if not told.pop("do_sample"):
        values["temperature"] = 0.0
    taken = _ALWAYS if values["temperature"] == 0 else _SAMPLED + _ALWAYS
    values |= {name: told[name] for name in taken if name in told}
    unknown = told.keys() - {*_SAMPLED, *_ALWAYS}
    if unknown:
        known = ", ".join(("until", "max_gen_toks", "do_sample", "temperature", *_SAMPLED, *_ALWAYS))
        raise EvaluationError(
            f"generation_kwargs {', '.join(sorted(unknown))} are not served; known: {known}"
        )
    return SamplingParams(stop=until, **values, **own)
