"""Makes openapi.json, an OpenAPI 3.1 document, from the tables of routes and of fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlxpool.gateway.description.answers import COMPONENTS
from mlxpool.gateway.description.schemas import ref
from mlxpool.gateway.openai.batches.fields import FORM
from mlxpool.gateway.operations.exchange import REQUEST_ID
from mlxpool.gateway.route_spec import RouteSpec

DESCRIPTION = (
    "HTTP for a pool of mlxpool, in the formats of OpenAI, Anthropic and Ollama. In a request null"
    " counts as absent, and an unknown field is refused with its name."
)
KEY_SCHEME = "key"

RESUMPTION: list[dict[str, Any]] = [
    {
        "name": name,
        "in": "header",
        "required": False,
        "schema": {"type": "string"},
        "description": description,
    }
    for name, description in (
        ("Idempotency-Key", "a key of this request alone: its answer outlives the gateway"),
        ("Last-Event-ID", "of a request that comes again: the id of the last event it has"),
    )
]


def document(routes: Iterable[RouteSpec], version: str, *, keys: bool) -> dict[str, Any]:
    """Returns the document of a gateway of this version; `keys`: requests need a bearer key."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = dict(COMPONENTS)
    for route in routes:
        operation = _operation(route, keys=keys)
        if route.body is not None:
            name = f"{_operation_id(route)}_request"
            schemas[name] = route.body.schema()
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": ref(name)}},
            }
        if route.reads_body:
            form = {"multipart/form-data": {"schema": FORM.schema()}}
            operation["requestBody"] = {"required": True, "content": form}
        paths.setdefault(route.shown_path, {})[route.method.lower()] = operation
    components: dict[str, Any] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {KEY_SCHEME: {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxpool gateway", "version": version, "description": DESCRIPTION},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": components,
    }


def _operation(route: RouteSpec, *, keys: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "tags": [route.interface.name],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", route.shown_path)
        ]
        + [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in _query(route).items()
        ]
        + (RESUMPTION if route.stream is not None and route.body is not None else []),
        "responses": {
            "200": _response("The answer.", _contents(route)),
            "default": _response(
                "An error.", {"application/json": {"schema": ref(route.interface.error_schema)}}
            ),
        },
    }
    if keys:
        operation["security"] = [] if route.public else [{KEY_SCHEME: []}]
    return operation


def _query(route: RouteSpec) -> Mapping[str, Any]:
    return {} if route.query is None else {**route.query.honoured, **route.query.accepted}


def _contents(route: RouteSpec) -> Mapping[str, Any]:
    schema = ref(route.answer) if route.answer else {"type": "string"}
    contents = {route.content_type: {"schema": schema}}
    if route.stream is not None:
        kind = route.stream.partition(";")[0]
        line_schema = {"description": "of each event or line", "allOf": [ref(route.event)]}
        contents[kind] = {"schema": line_schema}
    return contents


def _response(description: str, content: Mapping[str, Any]) -> dict[str, Any]:
    header = {"schema": {"type": "string"}, "description": "the id of the request, as in logs"}
    return {"description": description, "headers": {REQUEST_ID: header}, "content": content}


def _operation_id(route: RouteSpec) -> str:
    words = re.findall(r"[a-z0-9]+", route.shown_path.lower())
    return "_".join((route.method.lower(), *(words or ["index"])))
