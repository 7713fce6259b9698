"""One HTML file of a template, styles, scripts and data, all in it.

Its content security policy lets it ask for nothing, and run no script but its own.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from learner.runs.atomic_files import publish_text
from learner.runs.console import score

# What would end a script, or begin a comment, in the text of one.
_INERT = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def publish_page(
    out: Path, template: str, scripts: Sequence[str], values: Mapping[str, Any]
) -> None:
    """Render `template` into the file `out`, which appears whole or not at all.

    scripts: JavaScript, run in this order when the page is there. The template has `values`,
    `style`, `scripts` and `policy`.
    """
    shown = (
        _environment()
        .get_template(template)
        .render(
            **values,
            style=asset("page.css"),
            early=asset("theme_early.js"),
            scripts=scripts,
            policy=_policy([asset("theme_early.js"), *scripts]),
        )
    )
    publish_text(out, shown)


@cache
def asset(name: str) -> str:
    return (files("learner.analysis.report") / "assets" / name).read_text(encoding="utf-8")


def inert_json(value: Any) -> str:
    """JSON that may stand in a script element whatever strings it holds. Has no NaN."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_INERT)


def _code(text: str) -> Markup:
    """What stands between backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _policy(scripts: Sequence[str]) -> str:
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("learner.analysis.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inert_json"] = lambda value: Markup(inert_json(value))
    environment.filters["code"] = _code
    environment.filters["score"] = score
    environment.filters["path"] = lambda value: escape(value).replace("/", Markup("/<wbr>"))
    return environment
