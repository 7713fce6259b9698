"""The report in a real browser: it asks for nothing, draws what is there, and can be used."""

import io
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from PIL import Image, ImageStat
from playwright.sync_api import Browser, Locator, Page, expect

from learner.analysis.evaluation.folder import Scored, write_evaluation
from learner.analysis.report import write_gallery, write_report
from learner.runs.rollout_log import LoggedAnswer, LoggedObject, StepAnswer
from learner.runs.run_folder import RunFolder
from learner.types import GroundTruthObject
from tests.browser import Theme, eventually, opened, running_browser
from tests.unit.eval_answers import DATA, answers, box
from tests.unit.report_folder import B, Box, MadeRun, answer, call_line, draw_image, step_line

pytestmark = pytest.mark.req("REPORT-01")

EVIL = (
    "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='x'\">"
)
KNOWN: Box = (200, 300, 600, 800)
TRUTH: Box = (240, 300, 600, 800)
FAR: Box = (700, 50, 900, 200)
SIZE = (64, 48)
# Of a line, which a bounding rectangle has in it.
STROKE = 2.25


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


def answers_of_a_run(images: Path) -> list[StepAnswer]:
    """The worst is evil; one is cut off, one has a match, one image is gone."""
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
    calls = [call_line(step) for step in range(1, 20, 2)]
    return write_report(MadeRun(folder / "run", lines, calls, answers_of_a_run(folder)).write())


def cards(page: Page) -> Locator:
    return page.locator("#cards > li")


def see_all(page: Page) -> None:
    """Every chart is drawn when it comes into view."""
    for chart in page.locator("[data-chart]").all():
        chart.scroll_into_view_if_needed()
        expect(chart.locator("svg.main-svg").first).to_be_visible()


def test_every_chart_is_drawn_and_nothing_is_asked_for(browser: Browser, report: Path) -> None:
    with opened(browser, report) as watched:
        page = watched.page
        see_all(page)
        assert page.locator("[data-chart]").count() >= 12
        bars = page.locator("#chart-steps .bars .point path")
        eventually(lambda: bars.count() >= 20 * 4)
        page.locator("#chart-loss .nsewdrag").hover()
        expect(
            page.locator("#chart-loss .hoverlayer .legend, #chart-loss .hovertext").first
        ).to_be_visible()
        assert page.title() == "small"


def test_the_headline_leads_to_its_evaluation(browser: Browser, report: Path) -> None:
    kept = report.parent / "evaluations" / "step_000020" / "report.html"
    try:
        kept.parent.mkdir(parents=True)
        write_gallery([], kept, "Evaluation", {})
        write_report(RunFolder.open(report.parent))
        with opened(browser, report) as watched:
            first = watched.page.locator(".tiles > div").first
            expect(first).to_contain_text("Held-out F1")
            expect(first).to_contain_text("0.875")
            first.locator("a").click()
            expect(watched.page).to_have_url(kept.as_uri())
    finally:
        shutil.rmtree(report.parent / "evaluations")
        write_report(RunFolder.open(report.parent))


def test_a_box_is_where_its_numbers_say(browser: Browser, report: Path) -> None:
    with opened(browser, report, anchor="#sample-4-train.jsonl-102") as watched:
        page = watched.page
        loaded = "image => image.complete && image.naturalWidth > 0"
        eventually(lambda: page.locator("#detail .shot img").evaluate(loaded))
        image = page.locator("#detail .shot img").bounding_box()
        shape = page.locator("#detail .shot .match .line").bounding_box()
        assert image is not None
        assert shape is not None
        assert image["width"] > 300, "a small image is shown enlarged"
        assert image["width"] / image["height"] == pytest.approx(SIZE[0] / SIZE[1], rel=0.01)
        left, top = image["x"] - STROKE / 2, image["y"] - STROKE / 2
        wanted = [
            left + KNOWN[0] / 999 * image["width"],
            top + KNOWN[1] / 999 * image["height"],
            (KNOWN[2] - KNOWN[0]) / 999 * image["width"] + STROKE,
            (KNOWN[3] - KNOWN[1]) / 999 * image["height"] + STROKE,
        ]
        drawn = [shape["x"], shape["y"], shape["width"], shape["height"]]
        assert drawn == pytest.approx(wanted, abs=0.5)
        pixelated = "element => getComputedStyle(element).imageRendering"
        assert page.locator("#detail .shot img").evaluate(pixelated) == "pixelated"


def test_an_answer_tells_all_about_it(browser: Browser, report: Path) -> None:
    with opened(browser, report, anchor="#sample-4-train.jsonl-102") as watched:
        detail = watched.page.locator("#detail")
        expect(detail).to_be_visible()
        rows = detail.locator("tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.nth(0)).to_contain_text("[200, 300, 600, 800]")
        expect(rows.nth(0)).to_contain_text("0.9")
        expect(rows.nth(1)).to_contain_text("false positive")
        expect(detail).to_contain_text("version 4")
        expect(detail).to_contain_text("--step 4")
        detail.locator(".shot .stray .line").hover(position={"x": 4, "y": 4})
        expect(watched.page.locator("#tip")).to_contain_text("ghost")
        expect(detail.locator("tr.lit")).to_contain_text("ghost")
        watched.page.keyboard.press("Escape")
        expect(detail).not_to_be_visible()
        expect(watched.page).to_have_url(re.compile("#gallery$"))


def test_what_an_answer_says_is_text(browser: Browser, report: Path) -> None:
    with opened(browser, report) as watched:
        page = watched.page
        first = cards(page).first
        first.locator("a").click()
        expect(page.locator("#detail pre.answer")).to_contain_text(EVIL)
        expect(page.locator("#detail mark")).to_have_text('"object_1"')
        expect(page.locator("#detail")).to_contain_text("whose corners are the wrong way round")
        expect(page.locator("#detail")).to_contain_text("ловушка")
        assert page.locator("img[src=x]").count() == 0
        assert page.title() == "small"


def test_answers_are_found_by_step_fault_and_words(browser: Browser, report: Path) -> None:
    with opened(browser, report) as watched:
        page = watched.page
        expect(cards(page)).to_have_count(30)
        page.get_by_role("button", name="Show more").click()
        expect(cards(page)).to_have_count(44)
        expect(page.get_by_role("button", name="Show more")).not_to_be_visible()
        page.locator("select[name=step]").select_option("4")
        expect(cards(page)).to_have_count(2)
        page.locator("select[name=fault]").select_option("wrong_desc")
        expect(cards(page)).to_have_count(1)
        expect(page.locator("#count")).to_have_text("1 shown, 1 of the 44 answers here fit.")
        page.locator("select[name=step]").select_option("")
        page.locator("select[name=fault]").select_option("truncated")
        expect(cards(page)).to_contain_text(["train.jsonl:101"])
        page.locator("select[name=fault]").select_option("")
        page.get_by_role("searchbox", name="Search").fill("ЛОВУШКА")
        expect(cards(page)).to_contain_text(["train.jsonl:100"])
        page.get_by_role("searchbox", name="Search").fill("no such thing")
        expect(cards(page)).to_have_count(0)
        page.get_by_role("searchbox", name="Search").fill("")
        page.locator("select[name=order]").select_option("sample")
        expect(cards(page).first).to_contain_text("train.jsonl:0")


def test_each_kind_of_box_can_be_hidden(browser: Browser, report: Path) -> None:
    with opened(browser, report) as watched:
        page = watched.page
        page.locator("select[name=step]").select_option("4")
        card = page.locator('[id="sample-4-train.jsonl-102"]')
        for role, name in [
            ("truth", "ground truth, matched"),
            ("match", "prediction, matched"),
            ("stray", "false positive"),
        ]:
            box = page.locator("#tools").get_by_role("checkbox", name=name)
            expect(card.locator(f".shape.{role}")).to_be_visible()
            box.uncheck()
            expect(card.locator(f".shape.{role}")).not_to_be_visible()
            box.check()
            expect(card.locator(f".shape.{role}")).to_be_visible()
        page.locator("#tools").get_by_role("checkbox", name="missed, appended").uncheck()
        card.locator("a").click()
        expect(page.locator("#detail").get_by_label("missed, appended")).not_to_be_checked()


def test_an_image_that_is_gone_has_a_place_with_the_reason(browser: Browser, report: Path) -> None:
    with opened(browser, report, anchor="#sample-4-train.jsonl-103") as watched:
        lost = watched.page.locator("#detail .lost")
        expect(lost).to_contain_text("lost.png cannot be read (No such file or directory)")
        box = lost.bounding_box()
        assert box is not None
        assert box["height"] > 200


def ground(page: Page) -> str:
    colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return colour


def differs(page: Page, before: str) -> bool:
    """Whether the ground has another colour now."""
    return ground(page) != before


def differs_again(page: Page, before: str) -> bool:
    """Whether it has, once the page is loaded anew."""
    page.reload()
    return differs(page, before)


def brightness(picture: bytes) -> float:
    image = Image.open(io.BytesIO(picture)).convert("L")
    assert len(image.getcolors() or ()) > 20, "a blank picture"
    return ImageStat.Stat(image).mean[0]


def test_the_page_has_two_themes_and_a_button(browser: Browser, report: Path) -> None:
    seen: dict[Theme, float] = {}
    for theme in ("light", "dark"):
        with opened(browser, report, theme=theme) as watched:
            page = watched.page
            page.locator("#chart-loss").scroll_into_view_if_needed()
            expect(page.locator("#chart-loss svg.main-svg").first).to_be_visible()
            seen[theme] = brightness(page.screenshot())
            before = ground(page)
            text = page.locator("#chart-loss .xtick text").first
            ink = text.evaluate("element => getComputedStyle(element).fill")
            page.locator("#theme").click()
            eventually(partial(differs, page, before))
            other = "Dark" if theme == "dark" else "Light"
            expect(page.locator("#theme")).to_contain_text(other)
            expect(text).not_to_have_css("fill", ink)  # charts follow the theme
            eventually(partial(differs_again, page, before))  # the choice is kept
    assert seen["light"] > 180
    assert seen["dark"] < 70


def luminance(colour: list[int]) -> float:
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


CONTRAST_PAIRS = [
    ("ink", "ground"),
    ("quiet", "ground"),
    ("quiet", "raised"),
    ("ink", "sunken"),
    ("accent", "ground"),
    ("warn", "warn-ground"),
    ("warn", "ground"),
    ("good", "ground"),
]

RGB_OF = """name => {
  const probe = document.body.appendChild(document.createElement("span"));
  probe.style.color = `var(--${name})`;
  const rgb = getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(Number);
  probe.remove();
  return rgb;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(browser: Browser, report: Path, theme: Theme) -> None:
    with opened(browser, report, theme=theme) as watched:
        for text, behind in CONTRAST_PAIRS:
            colours = [watched.page.evaluate(RGB_OF, name) for name in (text, behind)]
            low, high = sorted(map(luminance, colours))
            assert (high + 0.05) / (low + 0.05) >= 4.5, f"{text} on {behind}"


PHONES = [(360, 640), (390, 844), (640, 360)]

# What of an answer's dialog is wider than it has room for, and what reaches beyond the screen.
CUT = """() => [...document.querySelectorAll("#detail, #detail *")].filter((element) => {
  const box = element.getBoundingClientRect();
  const wide = element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0
    && getComputedStyle(element).overflowX !== "visible";
  return wide || box.left < -0.5 || box.right > innerWidth + 0.5;
}).map((element) => `${element.tagName} ${element.className}`)"""


@pytest.mark.parametrize(("width", "height"), PHONES)
def test_an_answer_is_whole_on_a_phone(
    browser: Browser, report: Path, width: int, height: int
) -> None:
    with opened(
        browser, report, anchor="#sample-4-train.jsonl-102", width=width, height=height
    ) as watched:
        page = watched.page
        expect(page.locator("#detail")).to_be_visible()
        eventually(lambda: page.evaluate(CUT) == [])
        whole = {"x": 0, "y": 0, "width": width, "height": height}
        eventually(lambda: page.locator("#detail").bounding_box() == whole)
        for part in ("#close", "#next", "#detail .shot", "#detail tbody tr", "#detail pre"):
            last = page.locator(part).last
            last.scroll_into_view_if_needed()
            expect(last).to_be_in_viewport(ratio=0.9)


@pytest.mark.parametrize(("width", "height"), PHONES)
def test_the_page_fits_a_phone_and_the_keyboard_is_enough(
    browser: Browser, report: Path, width: int, height: int
) -> None:
    with opened(browser, report, width=width, height=height) as watched:
        page = watched.page
        see_all(page)
        eventually(lambda: page.evaluate("document.documentElement.scrollWidth") <= width)
        cards(page).first.locator("a").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#detail")).to_be_visible()
        title = page.locator("#detail-title").text_content()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#detail-title")).not_to_have_text(title or "")
        page.keyboard.press("Escape")
        expect(cards(page).nth(1).locator("a")).to_be_focused()


def test_a_box_has_its_description_on_it(browser: Browser, report: Path) -> None:
    with opened(browser, report) as watched:
        page = watched.page
        page.locator("select[name=step]").select_option("4")
        card = page.locator('[id="sample-4-train.jsonl-102"]')
        found = card.locator(".tag.match")
        expect(found).to_have_text("red box")
        picture = card.locator(".shot").bounding_box()
        tag, box = found.bounding_box(), card.locator(".shape.match .line").bounding_box()
        assert picture is not None
        assert tag is not None
        assert box is not None
        assert tag["y"] >= picture["y"]
        assert tag["x"] == pytest.approx(box["x"], abs=STROKE)
        assert tag["y"] + tag["height"] == pytest.approx(box["y"], abs=STROKE)
        expect(card.locator(".tag.stray")).to_have_text("ghost")
        truth = card.locator(".tag.truth")
        expect(truth).not_to_be_visible()
        page.locator("#tools").get_by_role("checkbox", name="prediction, matched").uncheck()
        expect(truth).to_be_visible()
        page.locator("#tools").get_by_role("checkbox", name="descriptions").uncheck()
        expect(truth).not_to_be_visible()
        wrong = page.locator('[id="sample-4-train.jsonl-103"] .tag')
        expect(wrong).to_have_text(["dog", "cat"])


def test_the_page_prints_with_every_chart(browser: Browser, report: Path) -> None:
    with opened(browser, report) as watched:
        watched.page.emulate_media(media="print")
        watched.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        drawn = watched.page.locator("[data-chart]:has(svg.main-svg)")
        expect(drawn).to_have_count(watched.page.locator("[data-chart]").count())
        expect(watched.page.locator(".bar")).not_to_be_visible()


def test_an_evaluation_is_shown_without_steps(browser: Browser, tmp_path: Path) -> None:
    image = draw_image(tmp_path / "a.png", SIZE, KNOWN)
    known = {"step", "rank", "chunk", "segment"}
    leaf = LoggedObject(desc="leaf", kind="poly", coords=[100, 100, 500, 50, 400, 700])
    answers = [
        LoggedAnswer(**each.model_dump(exclude=known))
        for each in (
            answer("val.jsonl:1", image=image, supervised=False),
            answer(
                "val.jsonl:2",
                ground_truth=[leaf],
                predicted=[],
                pairs=[],
                image=image,
                supervised=False,
            ),
        )
    ]
    out = tmp_path / "gallery.html"
    write_gallery(answers, out, "Evaluation", {"F1": "0.5"})
    with opened(browser, out) as watched:
        page = watched.page
        expect(cards(page)).to_have_count(2)
        expect(cards(page).first).to_contain_text("1 missed")
        expect(page.locator("select[name=step]")).not_to_be_visible()
        expect(page.locator("#tools")).not_to_contain_text("not trained on")
        expect(page.locator("#tools")).not_to_contain_text("appended")
        cards(page).first.locator("a").click()
        expect(page.locator("#detail")).not_to_contain_text("replay")
        outline = page.locator("#detail .shot .missed .line")
        expect(outline).to_have_attribute("points", "100 100 500 50 400 700")


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 14 descriptions, of which one is evil, one is taken for another, one is made up."""
    folder = tmp_path_factory.mktemp("evaluation")
    here = box("", 100, 100, 400, 400)
    names = [EVIL, "cat", "ловушка", *(f"thing {place}" for place in range(10))]
    there = [[GroundTruthObject(name, here.shape)] for name in names]
    said = [*there[1:2], *there[1:3], *([] for _ in range(5)), *there[8:]]
    said[-1] = [*said[-1], box("ghost", 600, 600, 900, 900)]
    found = answers(*zip(there, said, strict=True), side=640)
    write_evaluation(folder / "out", Scored.of(found, DATA, polygons=False), {"data": str(DATA)})
    return folder / "out" / "report.html"


COLUMNS = (
    *("description", "F1", "precision", "recall", "F1@mIoU", "F1 at 0.95", "AP", "AP50"),
    *("hits", "predicted", "ground truths"),
)


@pytest.mark.req("EVAL-01")
def test_an_evaluation_has_its_scores_by_description_which_can_be_sorted(
    browser: Browser, evaluation: Path
) -> None:
    with opened(browser, evaluation) as watched:
        page = watched.page
        expect(page.locator(".tiles > div").first).to_contain_text("F1")
        table = page.locator("#descriptions table")
        expect(table.locator("thead th")).to_have_text(list(COLUMNS))
        first = table.locator("tbody tr").first
        expect(table.locator("tbody tr")).to_have_count(14)
        expect(first.locator("td").first).to_have_text("0.000")
        f1 = table.get_by_role("button", name="F1", exact=True)
        f1.focus()
        page.keyboard.press("Enter")
        expect(first.locator("td").first).to_have_text("1.000")
        expect(table.locator("th[aria-sort=descending]")).to_have_text("F1")
        table.get_by_role("button", name="description").click()
        expect(first.locator("th")).to_have_text(EVIL)
        table.get_by_role("button", name="AP", exact=True).click()
        expect(table.locator("tbody tr").last).to_contain_text("ghost")
        table.get_by_role("button", name="AP", exact=True).click()
        expect(table.locator("tbody tr").last).to_contain_text("ghost")
        cat = table.locator("tbody tr").filter(has_text="cat").locator("td")
        f1s, aps = ["0.667", "0.667"], ["0.500", "0.500"]
        expect(cat).to_have_text(["0.667", "0.500", "1.000", *f1s, *aps, "1", "2", "1"])
        assert page.locator("img[src=x]").count() == 0
        assert page.title() == "Evaluation"


@pytest.mark.req("EVAL-01")
def test_an_evaluation_shows_what_is_taken_for_what_at_each_iou_and_size(
    browser: Browser, evaluation: Path
) -> None:
    with opened(browser, evaluation) as watched:
        page = watched.page
        matrix = page.locator("#confusion .matrix")
        expect(matrix.locator("thead th").last).to_have_text("missed")
        expect(page.locator("#confusion")).to_contain_text("The 12 most frequent of 14")
        expect(matrix.locator("tbody th").last).to_have_text("nothing there")
        mistakes = page.locator("#confusion table").last.locator("tbody tr")
        expect(mistakes.filter(has_text=EVIL)).to_contain_text("cat")
        expect(mistakes.filter(has_text="ghost")).to_contain_text("nothing there")
        expect(mistakes.filter(has_text="missed")).to_have_count(5)
        thresholds = page.locator("#thresholds table").first.locator("tbody tr")
        expect(thresholds).to_have_count(10)
        expect(thresholds.last).to_contain_text("0.95")
        sizes = page.locator("#thresholds table").nth(1).locator("tbody tr")
        expect(sizes.last).to_contain_text("large")
        expect(sizes.last.locator("td").nth(3)).to_have_text("7")
        expect(page.locator("#cards .tag").first).to_be_attached()


@pytest.mark.parametrize(("width", "height"), PHONES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_of_an_evaluation_fits_a_phone(
    browser: Browser, evaluation: Path, width: int, height: int, theme: Theme
) -> None:
    with opened(browser, evaluation, width=width, height=height, theme=theme) as watched:
        page = watched.page
        eventually(lambda: page.evaluate("document.documentElement.scrollWidth") <= width)
        cards(page).first.locator("a").click()
        expect(page.locator("#detail")).to_be_visible()
        eventually(lambda: page.evaluate(CUT) == [])
