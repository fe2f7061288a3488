"""Choice of the engine that gets a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from winnow.errors import ConfigError
from winnow_lab.bench.traces import TraceRequest


class Load(Protocol):
    """Load of an engine, as a router may know it."""

    @property
    def pending_tokens(self) -> int:
        """Tokens of prompts and answers that were sent to it and are not done."""


class Router(Protocol):
    """Choice of engines, one request after the other."""

    def choose(self, request: TraceRequest, loads: Sequence[Load]) -> int:
        """Return the index of the engine that gets the request."""


@dataclass
class RoundRobin:
    """One after the other."""

    _next: int = 0

    def choose(self, request: TraceRequest, loads: Sequence[Load]) -> int:
        chosen = self._next % len(loads)
        self._next += 1
        return chosen


class LeastLoaded:
    """Router to the engine with the fewest pending tokens; ties go to the first."""

    def choose(self, request: TraceRequest, loads: Sequence[Load]) -> int:
        return min(range(len(loads)), key=lambda index: loads[index].pending_tokens)


@dataclass
class PrefixAware:
    """Router to the engine that was sent the longest beginning of the prompt, unless it has `slack` times the least
    load and more.

    It goes by what it sent where, as a router that sees no caches must.
    """

    slack: float = 2.0
    _known: dict[int, set[int]] = field(default_factory=dict)

    def choose(self, request: TraceRequest, loads: Sequence[Load]) -> int:
        least = LeastLoaded().choose(request, loads)
        most = self.slack * loads[least].pending_tokens + request.prompt_tokens + request.output_tokens
        matches = [self._match(request, index) for index in range(len(loads))]
        best = max(range(len(loads)), key=lambda index: (matches[index], -loads[index].pending_tokens))
        chosen = best if matches[best] and loads[best].pending_tokens <= most else least
        self._known.setdefault(chosen, set()).update(request.hash_ids)
        return chosen

    def _match(self, request: TraceRequest, index: int) -> int:
        known = self._known.get(index, set())
        return next(
            (place for place, each in enumerate(request.hash_ids) if each not in known), len(request.hash_ids)
        )


ROUTERS: Mapping[str, type[RoundRobin | LeastLoaded | PrefixAware]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix": PrefixAware,
}
"""Routers by name."""


def make_router(name: str) -> Router:
    """Return a new router.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in ROUTERS:
        raise ConfigError(f"routing must be one of {', '.join(ROUTERS)}, got {name!r}")
    return ROUTERS[name]()
