"""An HTML file with its styles, scripts, tables, plots and pictures.

The content security policy of a page allows no requests and no other scripts.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from learner.data.show import Table
from learner.runs.atomic_files import publish_text


@dataclass(frozen=True)
class Tile:
    """A number in large letters. note: its meaning. link: URL of its details, or empty."""

    name: str
    value: str
    note: str = ""
    link: str = ""


@dataclass(frozen=True)
class Section:
    """slug: its anchor. plots: (slug, title), by heading. tables: of text or `Markup`."""

    slug: str
    title: str
    lead: str = ""
    plots: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    tables: Sequence[Table] = ()


def publish_page(out: Path, scripts: Sequence[str], values: Mapping[str, Any]) -> None:
    """Render `page.html` into the file `out`, atomically.

    scripts: JavaScript for the end of the page, in order. values: of the template.
    """
    template = _environment().get_template("page.html")
    style, policy = asset("page.css"), _policy(scripts)
    publish_text(out, template.render(**values, style=style, scripts=scripts, policy=policy))


@cache
def asset(name: str) -> str:
    return (files("learner.analysis.report") / "assets" / name).read_text(encoding="utf-8")


def link(text: str, url: str) -> Markup:
    return Markup('<a href="{}">{}</a>').format(url, text)


def _code(text: str) -> Markup:
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
    as_json = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    environment.policies["json.dumps_kwargs"] = as_json
    environment.filters["code"] = _code
    return environment
