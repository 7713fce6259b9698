"""The report in a real browser, without network."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Request, expect, sync_playwright

from learner.analysis.evaluation.folder import Scored, write_evaluation
from learner.analysis.report.run_page import write_report
from learner.runs.rollout_log import StepAnswer
from learner.types import GroundTruthObject, Shape
from tests.unit.eval_answers import DATA, answers
from tests.unit.report_folder import B, Box, MadeRun, answer, draw_image, step_line

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


pytestmark = [pytest.mark.slow, pytest.mark.req("REPORT-01")]

EVIL = (
    "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='x'\">"
)
KNOWN: Box = (200, 300, 600, 800)
TRUTH: Box = (240, 300, 600, 800)
FAR: Box = (700, 50, 900, 200)
KNOWN_SHAPE = Shape("bbox_2d", KNOWN)
SIZE = (64, 48)
# Width of the lines, which count for a bounding rectangle.
STROKE = 2.25


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


def answers_of_a_run(images: Path) -> list[StepAnswer]:
    """The worst has EVIL texts; one is cut off, one has a match, one has no image any more."""
    image = draw_image(images / "box.png", SIZE, KNOWN)
    wide = draw_image(images / "wide.png", (300, 100), FAR, "blue")
    good = [answer(f"train.jsonl:{place}", 10, image=wide) for place in range(40)]
    return [
        answer(
            "train.jsonl:100",
            2,
            truths=[(EVIL, KNOWN), ("ловушка", FAR)],
            predicted=[],
            pairs=[],
            dropped=[("object_1", "bbox_invalid")],
            text=f'{{"object_1": {{"desc": "{EVIL}"}}}}',
            image=image,
        ),
        answer("train.jsonl:101", 2, truncated=True, finish_reason="length", image=wide),
        answer(
            "train.jsonl:102",
            4,
            truths=[("red box", TRUTH)],
            predicted=[("red box", KNOWN), ("ghost", FAR)],
            image=image,
        ),
        answer("train.jsonl:103", 4, predicted=[("dog", KNOWN)], image=images / "lost.png"),
        *good,
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    lines = [step_line(step, "AB"[step % 2]) for step in range(1, 21)]
    lines[2] |= {"loss": None}
    lines[4] |= {f"{B}/strict_drop/bbox_invalid": 3.0}
    lines.append({"step": 20, "eval/f1": 0.875, "eval/precision": 0.5, "eval/recall": 0.5})
    return write_report(MadeRun(folder / "run", lines, answers=answers_of_a_run(folder)).write())


def cards(page: Page) -> Locator:
    return page.locator("#cards > li")


@pytest.mark.nightly
def test_every_plot_is_drawn_and_printed(browser: Browser, report: Path) -> None:
    with opened(browser, report) as watched:
        page = watched.page
        plots = page.locator("[data-plot]")
        assert plots.count() >= 8
        for plot in plots.all():
            plot.scroll_into_view_if_needed()
            expect(plot.locator("svg.main-svg").first).to_be_visible()
        loss = page.locator("[data-plot=training-loss]")
        loss.locator(".nsewdrag").hover()
        expect(loss.locator(".hoverlayer .legend, .hovertext").first).to_be_visible()
        expect(page.locator(".tiles > div").first).to_contain_text("0.875")
        expect(page.locator(".findings")).to_contain_text(
            "3 objects dropped as bbox_invalid (0.74%)"
        )
        page.reload()
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        expect(page.locator("[data-plot]:has(svg.main-svg)")).to_have_count(plots.count())


@pytest.mark.nightly
def test_detail_of_an_answer_has_its_boxes_at_their_coordinates(
    browser: Browser, report: Path
) -> None:
    with opened(browser, report, anchor="#answer-3") as watched:
        page, detail = watched.page, watched.page.locator("#detail")
        loaded = "image => image.complete && image.naturalWidth > 0"
        eventually(lambda: detail.locator(".shot img").evaluate(loaded))
        image = detail.locator(".shot img").bounding_box()
        shape = detail.locator(".shot .match .line").bounding_box()
        assert image is not None
        assert shape is not None
        assert image["width"] > 300, "a small image is enlarged"
        left, top = image["x"] - STROKE / 2, image["y"] - STROKE / 2
        expected = [
            left + KNOWN[0] / 999 * image["width"],
            top + KNOWN[1] / 999 * image["height"],
            (KNOWN[2] - KNOWN[0]) / 999 * image["width"] + STROKE,
            (KNOWN[3] - KNOWN[1]) / 999 * image["height"] + STROKE,
        ]
        drawn = [shape["x"], shape["y"], shape["width"], shape["height"]]
        assert drawn == pytest.approx(expected, abs=0.5)
        rows = detail.locator("tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.nth(0)).to_contain_text("[200, 300, 600, 800]")
        expect(rows.nth(1)).to_contain_text("false positive")
        expect(detail).to_contain_text("--step 4")
        expect(detail.locator(".shot .stray title")).to_contain_text("ghost")
        rows.nth(0).hover()
        expect(detail.locator(".shot .lit")).to_have_count(2)
        page.keyboard.press("Escape")
        expect(detail).not_to_be_visible()
        expect(page).to_have_url(re.compile("#gallery$"))
    with opened(browser, report, anchor="#answer-2") as watched:
        lost = watched.page.locator("#detail .lost")
        expect(lost).to_contain_text("lost.png cannot be read")


def test_text_of_answers_is_inert_and_can_be_searched(browser: Browser, report: Path) -> None:
    with opened(browser, report) as watched:
        page = watched.page
        cards(page).first.locator("a").click()
        expect(page.locator("#detail pre.answer")).to_contain_text(EVIL)
        assert page.locator("img[src=x]").count() == 0
        assert page.title() == "small"
        page.keyboard.press("Escape")
        expect(cards(page)).to_have_count(44)
        page.locator("select[name=step]").select_option("4")
        page.locator("select[name=fault]").select_option("wrong description")
        expect(page.locator("#count")).to_have_text("1 of the 44 answers here fit.")
        page.locator("select[name=step]").select_option("")
        page.locator("select[name=fault]").select_option("")
        page.get_by_role("searchbox", name="Search").fill("ЛОВУШКА")
        expect(cards(page)).to_contain_text(["train.jsonl:100"])


@pytest.mark.nightly
@pytest.mark.req("EVAL-01")
def test_page_of_an_evaluation_has_sortable_scores_and_the_confusion(
    browser: Browser, tmp_path: Path
) -> None:
    """Two thirds of the descriptions are found; EVIL is taken for a cat."""
    there = [[GroundTruthObject(name, KNOWN_SHAPE)] for name in (EVIL, "cat", "dog")]
    found = answers(*zip(there, [there[1], there[1], there[2]], strict=True), side=640)
    write_evaluation(tmp_path / "out", Scored.of(found, DATA, polygons=False), {"data": str(DATA)})
    with opened(browser, tmp_path / "out" / "report.html") as watched:
        page = watched.page
        table = page.locator("#descriptions table")
        cells = table.locator("tbody tr").first.locator("td")
        expect(cells.nth(1)).to_have_text("0.000")
        table.get_by_role("button", name="f1", exact=True).click()
        expect(cells.nth(1)).to_have_text("1.000")
        table.get_by_role("button", name="name").click()
        expect(cells.first).to_have_text(EVIL)
        mistakes = page.locator("#confusion tbody tr")
        expect(mistakes.filter(has_text=EVIL)).to_contain_text("cat")
        assert page.locator("img[src=x]").count() == 0
