"""/v1/files and /v1/batches."""

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from winnow.openai.errors import invalid
from winnow.server.batches import Batches
from winnow.server.forms import add_route
from winnow.server.http import read_json
from winnow.server.store import Record, Store, public

_PURPOSES = ("batch",)
_MAX_FIELDS = 8
_MAX_PAGE = 10_000


def add_file_routes(app: FastAPI, store: Store, batches: Batches) -> None:
    """Add them to the app."""

    @add_route(app, "POST", "/v1/files")
    async def upload(request: Request) -> Response:
        """Keep a file of requests."""
        async with request.form(max_files=1, max_fields=_MAX_FIELDS) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise invalid("file", "must be a file in multipart/form-data")
            if purpose not in _PURPOSES:
                raise invalid("purpose", f"must be {', '.join(_PURPOSES)}, got {purpose!r:.80}")
            name = (file.filename or "upload.jsonl")[:255]
            record = await asyncio.to_thread(
                store.add_file, file.file, name, str(purpose), request.state.tenant
            )
        return JSONResponse(public(record))

    @add_route(app, "GET", "/v1/files")
    async def list_files(request: Request) -> Response:
        """List the tenant's files, newest first."""
        purpose = request.query_params.get("purpose")
        found = store.records("file", request.state.tenant)
        return page(request, [each for each in found if purpose in (None, each["purpose"])])

    @add_route(app, "GET", "/v1/files/{name}")
    async def get_file(request: Request) -> Response:
        """Describe a file."""
        return JSONResponse(public(store.get(request.path_params["name"], "file", request.state.tenant)))

    @add_route(app, "DELETE", "/v1/files/{name}")
    async def delete_file(request: Request) -> Response:
        """Delete a file."""
        name = request.path_params["name"]
        await asyncio.to_thread(store.delete_file, name, request.state.tenant)
        return JSONResponse({"id": name, "object": "file", "deleted": True})

    @add_route(app, "GET", "/v1/files/{name}/content")
    async def file_content(request: Request) -> Response:
        """Return a file's content."""
        record = store.get(request.path_params["name"], "file", request.state.tenant)
        return FileResponse(store.content(record["id"]), media_type="application/jsonl")

    @add_route(app, "POST", "/v1/batches")
    async def create_batch(request: Request) -> Response:
        """Answer every line of a file."""
        return JSONResponse(public(await batches.create(await read_json(request), request.state.tenant)))

    @add_route(app, "GET", "/v1/batches")
    async def list_batches(request: Request) -> Response:
        """List the tenant's batches, newest first."""
        return page(request, store.records("batch", request.state.tenant))

    @add_route(app, "GET", "/v1/batches/{name}")
    async def get_batch(request: Request) -> Response:
        """Describe a batch."""
        return JSONResponse(public(store.get(request.path_params["name"], "batch", request.state.tenant)))

    @add_route(app, "POST", "/v1/batches/{name}/cancel")
    async def cancel_batch(request: Request) -> Response:
        """End a batch early."""
        return JSONResponse(public(await batches.cancel(request.path_params["name"], request.state.tenant)))


def page(request: Request, records: Sequence[Record]) -> Response:
    """Return the part of a list that the query asks for. Raises ApiError: the query asks for none."""
    query = request.query_params
    text = query.get("limit", "100")
    if not text.isdecimal() or not 1 <= int(text[:10]) <= _MAX_PAGE:
        raise invalid("limit", f"must be between 1 and {_MAX_PAGE}, got {text!r:.80}")
    after = query.get("after")
    if after is not None:
        places = [index for index, each in enumerate(records) if each["id"] == after]
        if not places:
            raise invalid("after", f"must be an id of the list, got {after!r:.80}")
        records = records[places[0] + 1 :]
    shown = [public(each) for each in records[: int(text)]]
    return JSONResponse(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(records) > len(shown),
        }
    )
