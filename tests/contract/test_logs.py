"""JSON logs: one object a line, whoever logs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.settings.options import ServerSettings

# What a server does, without an engine: its own setup, then vLLM's, as its engines do too.
SERVER = """
import logging
import warnings
import torch
from rollout_server.runtime.logs import set_up_logging, take_over_torch

set_up_logging("info", {log_format!r})
if {log_format!r} == "json":
    take_over_torch()
logging.getLogger("rollout_server.access").info("a call", extra={{"route": "/infer/"}})
logging.getLogger("rollout_server.serve").debug("hidden")
for library in ("httpx", "httpcore.connection"):  # as they write of an image's signed URL
    logging.getLogger(library).info("GET http://images/cat.png?signature=hidden")

import transformers
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging, init_logger

if {log_format!r} == "json":
    logging.captureWarnings(False)  # as in a fresh engine process
configure_logging(LoggingConfig())
init_logger("vllm.engine").info("first\\nsecond \\x1b %s", "é")
init_logger("vllm.engine").debug("hidden")
transformers.logging.get_logger("transformers.x").warning("from transformers")
logging.getLogger("torch.x").warning("from torch")
warnings.warn("a warning")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("rollout_server.serve").exception("it failed")
"""


def stderr_of_a_server(log_format: str) -> list[str]:
    settings = ServerSettings.model_validate(
        {"model": Path("/m"), "device": "cpu", "log_format": log_format}
    )
    done = subprocess.run(
        [sys.executable, "-c", SERVER.format(log_format=log_format)],
        env=os.environ | engine_environment(settings),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.req("SRV-08")
def test_every_line_of_every_library_is_one_json_object() -> None:
    lines = [json.loads(line) for line in stderr_of_a_server("json")]
    for line in lines:
        assert {"time", "level", "logger", "pid", "message"} <= set(line)
    by_logger = {line["logger"]: line for line in lines}
    assert by_logger["rollout_server.access"]["route"] == "/infer/"
    assert by_logger["vllm.engine"]["message"] == "first\nsecond \x1b é"
    assert by_logger["transformers.x"]["message"] == "from transformers"
    assert by_logger["torch.x"]["level"] == "WARNING"
    assert "a warning" in by_logger["py.warnings"]["message"]
    assert not {"httpx", "httpcore.connection"} & set(by_logger)
    failure = by_logger["rollout_server.serve"]
    assert failure["message"] == "it failed"
    assert failure["exception"].endswith("ZeroDivisionError: division by zero")


@pytest.mark.req("SRV-08")
def test_text_lines_are_for_reading() -> None:
    lines = stderr_of_a_server("text")
    assert any(line.endswith("rollout_server.access: a call") for line in lines)
    assert any(line.endswith("ZeroDivisionError: division by zero") for line in lines)
    assert not any(line.startswith("{") for line in lines)
    assert not any("hidden" in line for line in lines)
