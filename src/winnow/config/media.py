"""Options of the images that prompts may hold."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.config.option import Effect, option
from winnow.errors import ConfigError
from winnow.values.checks import check_integer

_MODALITIES = ("image", "video", "audio")
"""Names in vLLM's limits; images alone are served."""


def _limits(text: str) -> Any:
    """Read 4, image=4 or {"image": 4}."""
    name, equals, count = text.partition("=")
    return {name: int(count)} if equals else json.loads(text)


@dataclass(frozen=True)
class MediaConfig:
    """Options of the images that prompts may hold."""

    limit_mm_per_prompt: int | Mapping[str, int] = option(
        64, 'most images of a prompt, such as 4 or {"image": 4}; 0: none', effect=Effect.NEVER, parse=_limits
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "host whose http(s) URLs may be fetched as images, such as upload.wikimedia.org; may be repeated; left out: "
        "none",
        effect=Effect.NEVER,
    )
    allowed_local_media_path: str | Path | None = option(
        None,
        "directory below which prompts may name images as paths or file:// URLs; left out: none",
        effect=Effect.NEVER,
    )

    def __post_init__(self) -> None:
        limit: Any = self.limit_mm_per_prompt
        if isinstance(limit, Mapping):
            for name in limit:
                if name not in _MODALITIES:
                    raise ConfigError(
                        f"limit_mm_per_prompt must name {', '.join(_MODALITIES)}, got {name!r:.80}"
                    )
            limit = limit.get("image", 64)
            limit = limit.get("count", 64) if isinstance(limit, Mapping) else limit
        check_integer("limit_mm_per_prompt", limit, 0)
        object.__setattr__(self, "limit_mm_per_prompt", limit)
        domains: Any = self.allowed_media_domains
        domains = tuple(domains.split(",") if isinstance(domains, str) else domains)
        for each in domains:
            if not (isinstance(each, str) and each.strip() == each != "" and not {*each} & {*"/:@* "}):
                raise ConfigError(f"allowed_media_domains must be names of hosts, got {each!r:.80}")
        object.__setattr__(self, "allowed_media_domains", domains)
        path = self.allowed_local_media_path
        if path is not None and not Path(path).is_dir():
            raise ConfigError(f"allowed_local_media_path must be a directory, got {str(path)!r}")
