"""Tests marked `gpu`: each in a pytest of its own, so that what it holds of a GPU ends with it.

A process that has used CUDA keeps some hundred MiB of the GPU, and a server refuses a GPU that is
in use. The suite's own process never uses CUDA. Where there are too few GPUs a test is skipped.

`ROLLMATCH_REHEARSE_GPU=1 pytest tests/gpu` needs no GPU: each test runs in this process until it
first touches CUDA or starts a process, and must get there (`tests/rehearsal/test_gpu_suite.py`).
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

ROOT = Path(__file__).parents[2]
REHEARSES = os.environ.get("ROLLMATCH_REHEARSE_GPU") == "1"
IN_A_CHILD = "ROLLMATCH_GPU_TEST"
HERE = Path(__file__).parent


def gpus_needed(item: pytest.Item) -> int:
    """The largest number that a mark `gpu(number)` of the test says; 1 where none does."""
    return max([1, *(int(number) for mark in item.iter_markers("gpu") for number in mark.args)])


# What the process around a test takes beside it: its own timeout comes first, and is printed.
BESIDE_S = 60.0


def seconds_of(item: pytest.Item) -> float:
    marked = item.get_closest_marker("timeout")
    seconds = float(item.config.getini("timeout") if marked is None else marked.args[0])
    return seconds + BESIDE_S


class InItsOwnProcess(pytest.Item):
    """The test of the same name, in a pytest that runs no other one."""

    gpus = 1

    def runtest(self) -> None:
        if torch.cuda.device_count() < self.gpus:  # asks the driver, and holds nothing
            pytest.skip(f"needs {self.gpus} GPU(s)")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--numprocesses=0", self.nodeid],
            cwd=ROOT,
            env={**os.environ, IN_A_CHILD: "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            pytest.fail(done.stdout + done.stderr, pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After marks and names have chosen among the tests."""
    if REHEARSES or IN_A_CHILD in os.environ:
        return
    for place, item in enumerate(items):
        if item.path.is_relative_to(HERE) and item.get_closest_marker("gpu"):
            assert item.parent is not None
            apart = InItsOwnProcess.from_parent(item.parent, name=item.name)
            apart.gpus = gpus_needed(item)
            apart.own_markers = [pytest.mark.timeout(seconds_of(item)).mark, *item.own_markers]
            items[place] = apart


class GpuTouched(BaseException):
    """A rehearsal ends where a test first needs a GPU."""


@contextmanager
def without_gpus() -> Iterator[None]:
    """Eight GPUs seem to be there; the first use of one, or of a process, raises GpuTouched."""

    def touch(*_: Any, **__: Any) -> NoReturn:
        raise GpuTouched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 8)
        patch.setattr(torch.cuda, "is_available", lambda: False)  # for what runs on the CPU before
        patch.setattr(torch.cuda, "_lazy_init", touch)
        patch.setattr(torch.cuda, "set_device", touch)
        patch.setattr(subprocess.Popen, "__init__", touch)
        # The end of an object that was never made.
        patch.setattr(subprocess.Popen, "__del__", lambda _: None)
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """In a rehearsal a test passes when it reaches a GPU, with its fixtures made."""
    if not REHEARSES:
        yield
        return
    with without_gpus():
        outcome: Any = yield
    if outcome.exception is None:
        outcome.force_exception(AssertionError("it ended without a GPU"))
    elif isinstance(outcome.exception, GpuTouched):
        outcome.force_result(True)
