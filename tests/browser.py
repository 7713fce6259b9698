"""A real browser, for the tests of pages: Chromium without a window and without a network."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Skips where there is no Chromium; fails in CI, where there has to be one."""
    if not CHROMIUM.is_file():
        reason = f"there is no {CHROMIUM} to open the page with"
        (pytest.fail if "CI" in os.environ else pytest.skip)(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page, and what went wrong in it: errors of its scripts, requests that left the machine."""

    page: Page
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self._heard(message.type, message.text))
        self.page.on("request", self._asked)

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def _asked(self, request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.outside.append(request.url)


@contextmanager
def opened(browser: Browser, file: Path, *, anchor: str = "") -> Iterator[Watched]:
    """The file in a tab of its own, which must end without an error and without a request."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.emulate_media(reduced_motion="reduce")
    watched = Watched(page)
    try:
        page.goto(file.as_uri() + anchor)
        yield watched
        assert (watched.errors, watched.outside) == ([], [])
    finally:
        page.close()


def eventually(holds: Callable[[], object], patience_s: float = 60.0) -> None:
    """Waits until what a page shows `holds`; asks once more at the end, so that it may raise."""
    ends = time.monotonic() + patience_s
    while time.monotonic() < ends:
        if holds():
            return
        time.sleep(0.05)
    assert holds()
