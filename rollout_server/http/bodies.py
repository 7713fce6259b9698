"""The JSON bodies of calls: parsed, validated and documented."""

import re
from typing import Generic, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json

from rollout_server.runtime.refusals import refusal

# Largest number of faults in one answer.
MAX_FAULTS = 20

JSON_TYPE = re.compile(r"\s*application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)

Model = TypeVar("Model", bound=BaseModel)


class JsonBody(Generic[Model]):
    """FastAPI dependency that returns the body as a `model`.

    It runs after the router's dependencies, such as the token check. FastAPI's own body parameter
    reads the body before them.
    """

    def __init__(self, model: type[Model]) -> None:
        self.model = model

    async def __call__(self, request: Request) -> Model:
        """Raise the `bad-request` problem, or RequestValidationError with at most MAX_FAULTS."""
        if not JSON_TYPE.match(request.headers.get("content-type", "")):
            found = "it is not sent as JSON; give the header `content-type: application/json`"
            raise refusal("bad-request", found, "body")
        body = await request.body()
        try:
            return self.model.model_validate_json(body)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False, include_context=False)
        first = [{**fault, "loc": ("body", *fault["loc"])} for fault in faults[:MAX_FAULTS]]
        is_json = first[0]["type"] != "json_invalid"
        raise RequestValidationError(first, body=from_json(body) if is_json else None)


def declare_bodies(app: FastAPI) -> None:
    """Add the bodies of `JsonBody` routes to the OpenAPI document of `app`."""
    models = {
        route.path: dependency.call.model
        for route in app.routes
        if isinstance(route, APIRoute)
        for dependency in route.dependant.dependencies
        if isinstance(dependency.call, JsonBody)
    }
    schemas, definitions = models_json_schema(
        [(model, "validation") for model in models.values()],
        ref_template="#/components/schemas/{model}",
    )
    document = app.openapi()
    document["components"]["schemas"] |= definitions["$defs"]
    for path, model in models.items():
        content = {"application/json": {"schema": schemas[model, "validation"]}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
