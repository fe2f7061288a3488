"""/v1/responses/{name}: responses that were kept."""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from winnow.openai.errors import invalid
from winnow.openai.responses import PATH
from winnow.server.endpoints.file_routes import page
from winnow.server.routes import add_route
from winnow.server.service import Service


def add_response_routes(app: FastAPI, service: Service) -> None:
    """Add them to the app."""

    async def get_response(request: Request) -> Response:
        """Return a response that was kept."""
        turn = service.responses[request.state.tenant].get(request.path_params["name"])
        return Response(turn.response, media_type="application/json")

    async def delete_response(request: Request) -> Response:
        """Forget a response; those that continue it can still be continued."""
        name = request.path_params["name"]
        service.responses[request.state.tenant].delete(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def list_input_items(request: Request) -> Response:
        """List what a response answers, newest first: the conversation before it, and its own input."""
        turn = service.responses[request.state.tenant].get(request.path_params["name"])
        items, order = turn.input_items(), request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", f"must be asc or desc, got {order!r:.80}")
        return page(request, items if order == "asc" else items[::-1])

    for method, path, route in (
        ("GET", f"{PATH}/{{name}}", get_response),
        ("DELETE", f"{PATH}/{{name}}", delete_response),
        ("GET", f"{PATH}/{{name}}/input_items", list_input_items),
    ):
        add_route(app, method, path, route)
