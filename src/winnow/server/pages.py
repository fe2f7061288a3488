"""The pages: a dashboard at /, a chat at /chat, which load nothing from anywhere else. And the
numbers that the dashboard shows, as they change.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from winnow.engine.counters import Occupancy
from winnow.openai.response import event
from winnow.outputs import EngineStats, SessionStats
from winnow.process.resources import resident_bytes
from winnow.server.http import EventStream
from winnow.server.service import Service
from winnow.version import __version__

_SCRIPTS = ("marked-18.2.1.umd.js", "dompurify-3.5.0.min.js", "chat.js", "dashboard.js")
PAGES = {
    **{"/": "dashboard.html", "/chat": "chat.html"},
    **{f"/static/{name}": f"static/{name}" for name in _SCRIPTS},
}
INTERVAL = 1.0
"""Seconds between two events."""
HISTORY_SECONDS = 5.0
"""Seconds between two samples of the last hour."""
MAX_SHOWN = 50
"""Sessions, those used last."""
_COUNTERS = (
    *("kv_bytes_used", "kv_bytes_peak", "kv_bytes_budget", "kv_bytes_freed", "host_bytes_used"),
    *("host_bytes_budget", "prompt_tokens", "generated_tokens", "cached_tokens", "session_seconds"),
)
_Moment = tuple[EngineStats, list[SessionStats], Occupancy]
# A page loads nothing from elsewhere, asks this server alone, and may not be framed. No script stands in one: the chat
# shows what models say as HTML, and none that is smuggled in runs.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class History:
    """What the dashboard draws, of the last hour since the start.

    Attributes:
        samples: Unix seconds, answers that run and wait, tokens per second generated and of prompts, and bytes of KV
            memory in use and that hold prefixes.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.samples = deque[tuple[float, ...]](maxlen=int(3600 / HISTORY_SECONDS))

    async def record(self) -> None:
        """Sample until the server ends."""
        before, since, ending = EngineStats(), time.monotonic() - HISTORY_SECONDS, self._service.ending
        while self._service.engine.failure is None and not ending.is_set():
            stats, now = await self._service.stats(), time.monotonic()
            answers = [
                sum(each) for each in zip((0, 0), *self._service.engine.by_tenant().values(), strict=True)
            ]
            rates = _rates(before, stats, now - since)
            self.samples.append((time.time(), *answers, *rates, stats.kv_bytes_used, stats.cached_bytes))
            before, since = stats, now
            with suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), HISTORY_SECONDS)


def _rates(before: EngineStats, now: EngineStats, seconds: float) -> tuple[float, float]:
    """Return tokens per second, generated and of prompts."""
    generated = now.generated_tokens - before.generated_tokens
    return generated / seconds, (now.prompt_tokens - before.prompt_tokens) / seconds


def add_pages(app: FastAPI, service: Service, history: History) -> None:
    """Add the pages, and the stream of the dashboard's numbers, once a second, as server-sent events; the first has
    the history."""
    config = service.config
    if not config.dashboard:
        return
    for path, name in PAGES.items():
        app.add_route(path, _page(name), include_in_schema=False)

    @app.get("/stats/stream", include_in_schema=False)
    async def stats(request: Request) -> Response:
        return EventStream(_events(service, request.state.tenant, list(history.samples)))


def _page(name: str) -> Callable[[Request], Response]:
    page = files("winnow.server").joinpath(name).read_text(encoding="utf-8")
    kind = "text/javascript" if name.endswith(".js") else "text/html"
    return lambda request: Response(page, media_type=kind, headers=_HEADERS)


async def _events(
    service: Service, tenant: str | None, history: list[tuple[float, ...]]
) -> AsyncIterator[str]:
    def read() -> _Moment:
        return service.llm.stats(), service.llm.sessions(tenant), service.llm.occupancy()

    moment: _Moment = await service.stats(), await service.sessions(tenant), await service.occupancy()
    before, since = moment[0], time.monotonic() - INTERVAL
    while service.engine.failure is None and not service.ending.is_set():
        with suppress(TimeoutError):  # a step takes long: what was true before it
            moment = await asyncio.wait_for(service.engine.call(read), INTERVAL)
        now, stats = time.monotonic(), moment[0]
        snapshot = _snapshot(service, *moment)
        seconds = max(now - since, INTERVAL / 2)
        snapshot["generated_per_second"], snapshot["prompt_per_second"] = _rates(before, stats, seconds)
        snapshot["session_per_second"] = (stats.session_tokens - before.session_tokens) / seconds
        before, since = stats, now
        yield event(snapshot | ({"history": history} if history else {}))
        history = []
        with suppress(TimeoutError):
            await asyncio.wait_for(service.ending.wait(), INTERVAL)
    yield event({"failure": "the engine has failed" if service.engine.failure else "the server has ended"})


def _snapshot(
    service: Service, stats: EngineStats, sessions: list[SessionStats], occupancy: Occupancy
) -> dict[str, Any]:
    answers = service.engine.by_tenant()
    running, waiting = (sum(each[place] for each in answers.values()) for place in (0, 1))
    names = sorted({tenant or "" for tenant in answers} | set(occupancy.tenants))

    def tenant_row(name: str) -> dict[str, Any]:
        of_tenant = sum(answers.get(name or None, (0, 0)))
        return {"name": name, "bytes": occupancy.tenants.get(name, 0), "answers": of_tenant}

    return {
        "time": time.time(),
        "model": service.names[0],
        "version": __version__,
        "draining": service.engine.draining,
        "running": running,
        "waiting": waiting,
        "batch_answers": service.engine.background,
        "resident_bytes": resident_bytes() or 0,
        **{name: getattr(stats, name) for name in _COUNTERS},
        "kv_bytes_cached": stats.cached_bytes,
        "disk_bytes_used": 0 if stats.disk_tier is None else stats.disk_tier.bytes_used,
        "disk_bytes_budget": 0 if stats.disk_tier is None else stats.disk_tier.bytes_budget,
        "preemptions": {
            "out of KV memory, copied to host memory": stats.num_swaps,
            "out of KV memory, computed again": stats.num_preemptions - stats.num_swaps,
        },
        "rounds": stats.num_rounds,
        "agreement": {"checked": stats.agreement.checked, "equal": stats.agreement.equal},
        "evicted_kvs": service.metrics.evicted_kvs,
        "policies": [(name, *counts) for name, counts in sorted(service.metrics.kept.items())],
        "seconds": {phase: max(0.0, seconds) for phase, seconds in stats.elapsed.items()},
        "finished": service.metrics.finished,
        "latencies": service.metrics.latencies(),
        "tenants": [tenant_row(name) for name in names],
        "sessions": [asdict(each) for each in sessions[:MAX_SHOWN]],
        "session_tiers": stats.sessions,
        "session_bytes": sum(each.num_bytes for each in sessions),
        "kept": occupancy.kept,
    }
