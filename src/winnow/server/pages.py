"""The pages: a dashboard at /, a chat at /chat, the operations at /docs. Each is one file that loads nothing else."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from winnow.server.config import ServerConfig

# A page loads nothing from anywhere, asks this server alone, and may not be framed.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def pages(config: ServerConfig) -> dict[str, str]:
    """Return the pages that are served: path -> file. They hold no data, and are served without a key."""
    shown = {"/": "dashboard.html", "/chat": "chat.html"} if config.dashboard else {}
    return shown | ({"/docs": "docs.html"} if config.docs else {})


def add_pages(app: FastAPI, config: ServerConfig) -> None:
    """Add them to the app."""
    for path, name in pages(config).items():
        app.add_api_route(
            path, _route(name), methods=["GET"], response_class=Response, include_in_schema=False
        )


def _route(name: str) -> Callable[[Request], Awaitable[Response]]:
    page = files("winnow.server").joinpath(name).read_text(encoding="utf-8")

    async def show(request: Request) -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    return show
