"""Write docs/api.md from the server; with --check, fail when it is out of date.

    scripts/api_reference.py [--check]
    scripts/api_reference.py --openapi FILE.json    write the server's OpenAPI document there

The page has a digest of the OpenAPI document, so --check also finds changes that it does not show.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout_server.http.app import create_app
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import PROBLEM_TITLES

DOCS = Path(__file__).parent.parent / "docs"
_REF = "#/components/schemas/"

INTRO = """\
# The HTTP interface of the rollout server

*Written by `scripts/api_reference.py` from the server; do not edit.*

The [glossary](method.md#glossary) explains special words.

Every server has the same content for programs at `/openapi.json`, and a page at `/docs` to read it
and to try calls. `scripts/api_reference.py --openapi FILE` writes the document to a file. All paths
work with and without the trailing slash. A server with a token answers 401 to calls without
`Authorization: Bearer TOKEN`, except to `/live/` and `/health/`.

Every error is an RFC 9457 problem document (`application/problem+json`): `type` (`urn:rollmatch:`
and the kind), `title`, `status`, `detail`, and `where` (the place in the request). `errors` lists
the faults if there are several. The kinds are:
"""


def document() -> dict[str, Any]:
    """The OpenAPI document of a server without a token."""
    settings = ServerSettings(model=Path("/model"), device="cpu")
    return create_app(Pool(settings)).openapi()


def page(api: dict[str, Any]) -> str:
    """The whole of docs/api.md."""
    parts = [INTRO, _problems()]
    routes = [(path, *route) for path, methods in api["paths"].items() for route in methods.items()]
    parts += [_route(path, method, operation) for path, method, operation in routes]
    parts += ["## Bodies\n"]
    schemas = sorted(api["components"]["schemas"].items())
    parts += [_schema(name, schema) for name, schema in schemas]
    digest = hashlib.sha256(json.dumps(api, sort_keys=True).encode()).hexdigest()
    parts += [f"The OpenAPI document has the SHA-256 `{digest}`.\n"]
    return "\n".join(parts)


def _problems() -> str:
    rows = [
        f"| `{kind}` | {status} | {title} |" for kind, (status, title) in PROBLEM_TITLES.items()
    ]
    return "\n".join(["| kind | status | title |", "| --- | --- | --- |", *rows]) + "\n"


def _route(path: str, method: str, operation: dict[str, Any]) -> str:
    return "\n".join([f"## `{method.upper()} {path}`\n", *_told(operation)])


def _told(operation: dict[str, Any]) -> Iterator[str]:
    yield f"{operation['description']}\n"
    for parameter in operation.get("parameters", ()):
        is_required = parameter["required"]
        default = _default(parameter["schema"], required=is_required)
        shown = default if is_required else f"default {default}"
        yield f"- {parameter['in']} `{parameter['name']}`: {shown}"
    if body := operation.get("requestBody"):
        yield f"- body: {_type(_content(body))}"
    for status, response in sorted(operation["responses"].items()):
        if status == "200":
            yield f"- 200: {_type(_content(response))}"
        else:
            yield f"- {status}: {response['description']}"
    yield ""


def _content(message: dict[str, Any]) -> dict[str, Any]:
    (content,) = message["content"].values()
    schema: dict[str, Any] = content["schema"]
    return schema


def _schema(name: str, schema: dict[str, Any]) -> str:
    lines = [f"### {name}\n"]
    if told := schema.get("description"):
        lines += ["```text", told, "```\n"]
    lines += ["| field | type | default |", "| --- | --- | --- |"]
    required = schema.get("required", [])
    lines += [
        f"| `{field}` | {_type(value)} | {_default(value, required=field in required)} |"
        for field, value in schema["properties"].items()
    ]
    return "\n".join(lines) + "\n"


def _default(schema: dict[str, Any], *, required: bool) -> str:
    if required:
        return "**required**"
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else "`null`"


def _type(schema: dict[str, Any]) -> str:
    """A JSON Schema in a few words; the exact one is in the OpenAPI document."""
    if ref := schema.get("$ref"):
        name = ref.removeprefix(_REF)
        return f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(_type(option) for option in options)
    if values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    kind = "bytes" if schema.get("format") == "binary" else schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema['items'])}" if "items" in schema else "list"
    return str(kind)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--openapi", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    api, file = document(), DOCS / "api.md"
    text = page(api)
    if options.openapi:
        options.openapi.write_text(
            json.dumps(api, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    elif not options.check:
        file.write_text(text, encoding="utf-8")
    elif not file.exists() or file.read_text(encoding="utf-8") != text:
        sys.exit(f"{file} is out of date: run scripts/api_reference.py")


if __name__ == "__main__":
    main()
