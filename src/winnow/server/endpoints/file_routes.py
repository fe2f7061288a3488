"""/v1/files and /v1/batches."""

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from winnow.openai.errors import invalid
from winnow.server.batches import Batches
from winnow.server.forms import FILES, add_route
from winnow.server.http import read_json
from winnow.server.store import Record, public

_MAX_FIELDS = 8
_MAX_PAGE = 10_000


def add_file_routes(app: FastAPI, batches: Batches) -> None:
    store = batches.store

    @add_route(app, "POST", FILES)
    async def upload(request: Request) -> Response:
        """Keep a file of requests."""
        async with request.form(max_files=1, max_fields=_MAX_FIELDS) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise invalid("file", "must be a file in multipart/form-data")
            if purpose != "batch":
                raise invalid("purpose", f"must be batch, got {purpose!r:.80}")
            name = (file.filename or "upload.jsonl")[:255]
            record = await asyncio.to_thread(store.add_file, file.file, name, "batch", request.state.tenant)
        return JSONResponse(public(record))

    @add_route(app, "GET", FILES)
    async def list_files(
        request: Request,
        purpose: str | None = None,
        limit: str = "100",
        after: str | None = None,
        order: str = "desc",
    ) -> Response:
        """List the tenant's files, newest first unless `order` is asc."""
        found = store.records("file", request.state.tenant)
        return page([each for each in found if purpose in (None, each["purpose"])], limit, after, order)

    @add_route(app, "GET", f"{FILES}/{{name}}")
    async def get_file(request: Request, name: str) -> Response:
        """Describe a file."""
        return JSONResponse(public(store.get(name, "file", request.state.tenant)))

    @add_route(app, "DELETE", f"{FILES}/{{name}}")
    async def delete_file(request: Request, name: str) -> Response:
        """Delete a file."""
        await asyncio.to_thread(store.delete_file, name, request.state.tenant)
        return JSONResponse({"id": name, "object": "file", "deleted": True})

    @add_route(app, "GET", f"{FILES}/{{name}}/content")
    async def file_content(request: Request, name: str) -> Response:
        """Return a file's content."""
        record = store.get(name, "file", request.state.tenant)
        return FileResponse(store.content(record["id"]), media_type="application/jsonl")

    @add_route(app, "POST", "/v1/batches")
    async def create_batch(request: Request) -> Response:
        """Answer every line of a file."""
        return JSONResponse(public(await batches.create(await read_json(request), request.state.tenant)))

    @add_route(app, "GET", "/v1/batches")
    async def list_batches(request: Request, limit: str = "100", after: str | None = None) -> Response:
        """List the tenant's batches, newest first."""
        return page(store.records("batch", request.state.tenant), limit, after)

    @add_route(app, "GET", "/v1/batches/{name}")
    async def get_batch(request: Request, name: str) -> Response:
        """Describe a batch."""
        return JSONResponse(public(store.get(name, "batch", request.state.tenant)))

    @add_route(app, "POST", "/v1/batches/{name}/cancel")
    async def cancel_batch(request: Request, name: str) -> Response:
        """End a batch early."""
        return JSONResponse(public(await batches.cancel(name, request.state.tenant)))


def page(records: Sequence[Record], limit: str, after: str | None, order: str = "desc") -> Response:
    """Return the part of a list, newest first, that a query asks for. Raises ApiError: the query asks for none."""
    if order not in ("asc", "desc"):
        raise invalid("order", f"must be asc or desc, got {order!r:.80}")
    records = records if order == "desc" else records[::-1]
    if not limit.isdecimal() or not 1 <= int(limit[:10]) <= _MAX_PAGE:
        raise invalid("limit", f"must be between 1 and {_MAX_PAGE}, got {limit!r:.80}")
    if after is not None:
        places = [index for index, each in enumerate(records) if each["id"] == after]
        if not places:
            raise invalid("after", f"must be an id of the list, got {after!r:.80}")
        records = records[places[0] + 1 :]
    shown = [public(each) for each in records[: int(limit)]]
    return JSONResponse(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(records) > len(shown),
        }
    )
