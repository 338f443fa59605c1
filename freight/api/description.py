"""What the API says of itself in OpenAPI, beyond what FastAPI finds in the routes."""

import json
from typing import Any, Final

from fastapi import FastAPI

from freight.api.replies import REFUSED
from freight.api.requestid import HEADER

_Json = dict[str, Any]

_TEXT: Final[_Json] = {"type": "string"}
_MAYBE: Final[_Json] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_BODIES: Final[dict[str, _Json]] = {
    "/v1/": {"message": _TEXT, "type": _TEXT, "param": _MAYBE, "code": _MAYBE},
    "/resource_server/": {"code": _TEXT, "message": _TEXT, "info": _MAYBE},
    "/": {"code": _TEXT, "message": _TEXT, "hint": _MAYBE},
}
_NAMES: Final = {"/v1/": "OpenAIError", "/resource_server/": "FacilityError", "/": "Error"}
_SCHEME: Final = "token"


def describe(app: FastAPI) -> None:
    """Have the description say who may ask, how every refusal looks, and that each answer names its request."""
    found = app.openapi

    def described() -> _Json:
        if app.openapi_schema is None:
            app.openapi_schema = _finished(found())
        return app.openapi_schema

    app.openapi = described


def _finished(document: _Json) -> _Json:
    parts: _Json = document.setdefault("components", {})
    parts["securitySchemes"] = {_SCHEME: {"type": "http", "scheme": "bearer"}}
    document["security"] = [{_SCHEME: []}]
    parts["headers"] = {"Request": {"description": "The request, as the service's log calls it.", "schema": _TEXT}}
    schemas: _Json = parts.setdefault("schemas", {})
    schemas |= {name: _error(_BODIES[family]) for family, name in _NAMES.items()}
    for path, item in document["paths"].items():
        family = next(start for start in _BODIES if path.startswith(start))
        refusal = {"application/json": {"schema": {"$ref": f"#/components/schemas/{_NAMES[family]}"}}}
        for route in item.values():
            _finish(route["responses"], refusal)
            for parameter in route.get("parameters", []):
                parameter["schema"] = _without_null(parameter["schema"])
    _drop_unused(document, schemas)
    return document


def _finish(responses: _Json, refusal: _Json) -> None:
    # FastAPI says so of requests that it cannot read, where this service answers 400.
    responses.pop("422", None)
    for status, what in REFUSED.items():
        responses.setdefault(str(status), {"description": what["description"]})
    for status, answer in responses.items():
        answer["headers"] = {**answer.get("headers", {}), HEADER: {"$ref": "#/components/headers/Request"}}
        if int(status) >= 400:
            answer["content"] = refusal


def _without_null(schema: _Json) -> _Json:
    """Return the schema of a parameter that may be left out, which is not the same as null: that cannot be sent."""
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    if not kinds:
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**rest, **kinds[0]} if len(kinds) == 1 else {**rest, "anyOf": kinds}


def _drop_unused(document: _Json, schemas: _Json) -> None:
    while True:
        text = json.dumps(document)
        unused = [name for name in schemas if f'"#/components/schemas/{name}"' not in text]
        if not unused:
            return
        for name in unused:
            del schemas[name]


def _error(body: _Json) -> _Json:
    error = {"type": "object", "properties": body, "required": list(body), "additionalProperties": False}
    return {"type": "object", "properties": {"error": error}, "required": ["error"], "additionalProperties": False}
