"""Logs of the server: text, or one JSON object in each line (SRV-08).

vLLM sets up logging itself, in this process and in each engine process. For JSON lines it reads
`json_logging.json` (see `engines.vllm`), which names `json_handler`; so this module imports nothing
slow. Lines of an engine process during its imports, and of C++ code, are text.
"""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

# Settings for `logging.config.dictConfig` in an engine process.
JSON_LOGGING_FILE = Path(__file__).with_name("json_logging.json")

TEXT_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"

# Attributes of every record; all others come from `extra`. uvicorn's color_message repeats its
# message.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """Formatter of JSON lines: time (UTC), level, logger, pid, message, `extra`, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line; values that are not JSON become text."""
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
    """Return a handler to stderr; redirects warnings of this process to the log."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.captureWarnings(True)
    return handler


def set_up_logging(level: str, log_format: Literal["text", "json"]) -> None:
    # They log whole URLs, which may contain signatures.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if log_format == "text":
        logging.basicConfig(level=level.upper(), format=TEXT_FORMAT)
        return
    logging.basicConfig(level=level.upper(), handlers=[json_handler()])


def take_over_torch() -> None:
    """Send torch's log lines to the server's handlers; torch must be imported."""
    logging.getLogger("torch").handlers.clear()
    logging.getLogger("torch").propagate = True
