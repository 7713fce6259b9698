"""How the server logs: readable lines, or one JSON object a line (SRV-08).

vLLM sets up logging by itself, in this process and in each engine process; where the lines
are JSON it does so by `json_logging.json` (see `engines.vllm`), which names `json_handler`.
So nothing heavy is imported here. What an engine process says before that, while it
imports, and what C++ code prints stays text.
"""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

# The setup of an engine process, in the words of `logging.config.dictConfig`.
JSON_LOGGING_FILE = Path(__file__).with_name("json_logging.json")

TEXT_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"

# What every record has; anything else in one was given as `extra`. uvicorn's
# color_message is its message once more.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger, pid, message, the fields given as `extra`, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line; what JSON does not know is written as text."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def json_handler() -> logging.Handler:
    """To stderr; the warnings of this process become lines of it, too."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.captureWarnings(True)
    return handler


def set_up_logging(level: str, log_format: Literal["text", "json"]) -> None:
    """Log to stderr from now on."""
    # They write whole URLs, and those of images may be signed.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if log_format == "text":
        logging.basicConfig(level=level.upper(), format=TEXT_FORMAT)
        return
    logging.basicConfig(level=level.upper(), handlers=[json_handler()])


def take_over_torch() -> None:
    """Have torch, which is imported by now, print no lines of its own."""
    logging.getLogger("torch").handlers.clear()
    logging.getLogger("torch").propagate = True
