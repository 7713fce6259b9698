"""How the server logs: readable lines, or one JSON object a line (SRV-08).

vLLM sets up its own loggers, in this process and in each engine process; where the lines
are JSON it is told to do so by `json_logging.json` (see `engine_env`), which names
`JsonFormatter`. So nothing heavy is imported here.
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


def set_up_logging(level: str, log_format: Literal["text", "json"]) -> None:
    """Log to stderr from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT)
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if log_format == "json":
        logging.captureWarnings(True)
        # torch is imported by now and would print its own lines.
        logging.getLogger("torch").handlers.clear()
        logging.getLogger("torch").propagate = True
