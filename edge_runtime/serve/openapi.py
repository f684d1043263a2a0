"""The server's own description, made from the types that requests are parsed with."""

from __future__ import annotations

from typing import Any

import msgspec

from edge_runtime import __version__
from edge_runtime.serve.wire import ChatRequest, CompletionRequest

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
STATUSES = {
    "400": "The request is not valid, or longer than the context",
    "401": "The key is missing or wrong",
    "403": "Asked for under another host's name",
    "404": "No such model or path",
    "405": "Another method",
    "408": "The request did not come in time",
    "413": "Too large",
    "415": "Not JSON",
    "429": "The queue is full; retry-after says when to come back",
    "500": "An error of the server",
    "501": "An extra is not installed",
    "503": "No memory, no room, no turn in time, or shutting down; retry-after as of 429",
}


def document(keyed: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document. keyed: whether a key is needed."""
    kinds = {"chat/completions": ChatRequest, "completions": CompletionRequest}
    _, components = msgspec.json.schema_components(
        list(kinds.values()), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {
        f"/v1/{path}": {"post": _operation(path, _reference(kind))} for path, kind in kinds.items()
    }
    for path, summary in (
        ("/v1/models", "The model that is here"),
        ("/health", "Whether the server takes requests"),
        ("/metrics", "Prometheus' text format"),
    ):
        paths[path] = {"get": _operation(summary, None)}
    schemas = {name.rpartition(".")[2]: schema for name, schema in components.items()}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "bitnest-edge", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas | {"Error": ERROR}},
    }
    if keyed:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _operation(summary: str, body: dict[str, str] | None) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {
        status: {"description": text, "content": error} for status, text in STATUSES.items()
    }
    responses["200"] = {"description": "The answer; a stream of events where `stream` is true"}
    found: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return found
