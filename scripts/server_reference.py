"""Write docs/server-options.md from the server's settings; with --check, fail if it is old."""

import argparse
import sys
from pathlib import Path

from rollout_server.cli import default_text, metavar, option_names
from rollout_server.settings.options import ServerSettings
from shared_contracts.strict_model import bare_type, is_model

PAGE = Path(__file__).parent.parent / "docs" / "server-options.md"

INTRO = """\
# Options of the rollout server

*Written by `scripts/server_reference.py` from `rollout_server/settings/options.py`; do not edit.*

Each option of `rollout-server serve` is also a key of the YAML file that `--config` names. An
option overrides its key, and a key overrides what `--run-config` derives from a training YAML
([server.md](server.md#start)). A key whose name ends in `s` where its option's does not has a list;
that option can be repeated.

| option | key | value | default | meaning |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The whole of docs/server-options.md."""
    rows = []
    for name, field in ServerSettings.model_fields.items():
        kind = bare_type(field.annotation)
        option = f"`{option_names(name, field)}`" if not is_model(kind) else "in YAML only"
        value = "" if kind is bool or is_model(kind) else f"`{metavar(field)}`".replace("|", "\\|")
        default = "**required**" if field.is_required() else default_text(field)
        rows.append(f"| {option} | `{name}` | {value} | {default} | {field.description} |\n")
    return INTRO + "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE} is out of date: run scripts/server_reference.py")


if __name__ == "__main__":
    main()
