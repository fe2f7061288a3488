"""Options of speculation: tokens are proposed, computed together in one step, and kept as far as they are right."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from winnow.errors import ConfigError
from winnow.values.checks import check_choice, check_integer, check_names, require

METHODS = ("ngram", "draft_model", "mtp")
_REFUSED = ("eagle", "eagle3", "medusa", "mlp_speculator", "dflash")
"""Methods of vLLM's whose heads are trained apart, in files of their own that are not read."""
_FIELD = "speculative_config: "


@dataclass(frozen=True)
class SpeculativeConfig:
    """Where proposed tokens come from, under vLLM's names.

    ngram is prompt lookup: what followed the last tokens where they stood before is proposed to follow them again.
    draft_model asks a smaller model of the same vocabulary. mtp asks heads that the model's own checkpoint brings, or
    an assistant that reads its KVs (Gemma 4).

    Attributes:
        num_speculative_tokens: most tokens proposed in a step.
        prompt_lookup_max, prompt_lookup_min: how many last tokens must be found, the most and the fewest.
        model: the smaller one or the assistant, as `ModelConfig.model`.
        adaptive: as many are proposed as measured steps let expect a gain from, none included; False: always all.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 5
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    model: str | Path | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.method in _REFUSED:
            raise ConfigError(
                f"speculative_config: method must be one of {', '.join(METHODS)}, got {self.method!r}: its heads are "
                "trained apart, in files that are not read"
            )
        check_choice(_FIELD + "method", self.method, METHODS)
        require(isinstance(self.adaptive, bool), _FIELD + "adaptive", "true or false", self.adaptive)
        check_integer(_FIELD + "num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        check_integer(_FIELD + "prompt_lookup_max", self.prompt_lookup_max, 1, 64)
        check_integer(_FIELD + "prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        if self.method != "mtp":
            needs = self.method == "draft_model"
            said = f"{'given' if needs else 'left out'} with method {self.method}"
            require((self.model is not None) == needs, _FIELD + "model", said, self.model)


def parse_speculative(value: Any) -> SpeculativeConfig | None:
    """Read vLLM's speculative_config: JSON text, such a mapping, a `SpeculativeConfig`, or None.

    Raises:
        ConfigError: names the field and the limit.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative_config: unreadable JSON: {error}") from None
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    require(isinstance(value, Mapping), "speculative_config", 'an object {"method": "ngram", ...}', value)
    check_names("speculative_config", list(value), [each.name for each in fields(SpeculativeConfig)])
    values = {name: each for name, each in value.items() if each is not None}
    if "model" in values:  # as in vLLM: a model alone is a draft model
        values.setdefault("method", "draft_model")
    if str(values.get("method")).endswith("_mtp"):  # vLLM has a name for each architecture's
        values["method"] = "mtp"
    if values.get("method", "ngram") != "ngram":
        given = [name for name in values if name.startswith("prompt_lookup")]
        require(not given, _FIELD + " and ".join(given), "left out unless method is ngram", values["method"])
    elif "prompt_lookup_max" in values:  # as in vLLM: one bound given is both
        values.setdefault("prompt_lookup_min", values["prompt_lookup_max"])
    elif "prompt_lookup_min" in values:
        values["prompt_lookup_max"] = values["prompt_lookup_min"]
    return SpeculativeConfig(**values)
