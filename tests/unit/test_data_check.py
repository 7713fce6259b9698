"""What `learner data check` finds, and the commands of `learner data`: exit codes and errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from learner.cli import app
from learner.data.check import check_files, odd_text
from learner.data.checkpoint import SampleLengths, TokenLimits
from learner.data.jsonl import DataFile, read_samples
from learner.data.toy import ToyData, make_data
from shared_contracts.errors import ContractError
from tests.unit.data_files import box, lengths_of, line, paint, paint_all, write_lines
from tests.unit.small_run import RunYaml
from tests.unit.test_learner_cli import command

pytestmark = pytest.mark.req("DATA-01")

CAT = box("cat", 10, 20, 300, 400)


def check(*paths: Path, lengths: SampleLengths | None = None) -> list[DataFile]:
    return check_files(paths, allow_poly=False, lengths=lengths, canvas=256)


def found(path: Path) -> list[tuple[int, str, bool]]:
    """Line, kind and whether it is a warning, of every finding in a file."""
    (report,) = check(path)
    return [(int(f.where.rpartition(":")[2]), f.kind, f.warning) for f in report.findings]


def test_a_good_file_has_its_samples_and_objects_counted(tmp_path: Path) -> None:
    """Also with several images in a line, of which the first has the line's size."""
    paint_all(tmp_path, ["a.png", "b.png"])
    paint(tmp_path / "small.png", (32, 20))
    several = line("b.png") | {"images": ["b.png", "small.png", "b.png"]}
    path = write_lines(tmp_path / "d.jsonl", line("a.png", CAT, CAT), several)
    (report,) = check(path)
    assert (len(report.samples), report.objects, report.findings) == (2, 2, [])


def test_every_problem_is_found_in_the_order_of_the_lines(tmp_path: Path) -> None:
    paint_all(tmp_path, ["a.png", "b.png"])
    (tmp_path / "text.png").write_text("no image")
    path = write_lines(
        tmp_path / "d.jsonl",
        line("text.png", CAT),
        "{",
        line("a.png", {"desc": " ", "poly": [1, 2, 3, 4, 5, 6]}),
        line("a.png", size=(63, 48)),
        line("gone.png"),
        line("b.png", box("line", 5, 5, 5, 90)),
    )
    assert found(path) == [
        (1, "unreadable image", False),
        (2, "not JSON", False),
        (3, "geometry", False),
        (3, "description", False),
        (4, "other image size", False),
        (5, "unreadable image", False),
        (6, "too thin to match", True),
    ]


@pytest.mark.parametrize(
    ("first", "kind"), [("{", "not JSON"), ("", "empty line"), ('{"a": 1}', "unknown key")]
)
def test_a_first_line_of_no_known_format_is_a_fault_of_its_line(
    tmp_path: Path, first: str, kind: str
) -> None:
    paint_all(tmp_path, ["a.png"])
    path = write_lines(tmp_path / "d.jsonl", first, line("a.png", CAT))
    assert (1, kind, False) in found(path)
    assert {number for number, _, _ in found(path)} == {1}


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp"])
def test_a_truncated_image_is_unreadable(tmp_path: Path, suffix: str) -> None:
    image = tmp_path / f"a.{suffix}"
    Image.effect_noise((64, 48), 90).convert("RGB").save(image)
    content = image.read_bytes()
    image.write_bytes(content[: len(content) // 2])
    path = write_lines(tmp_path / "d.jsonl", line(image.name))
    assert found(path) == [(1, "unreadable image", False)]


@pytest.mark.parametrize("name", ["nowhere/b.png", "x" * 5_000, "a\0b", "\ud800"])
def test_an_image_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(line(name)))
    (report,) = check(path)
    (finding,) = report.findings
    assert finding.found.startswith(f"image {tmp_path / name} cannot be ")
    assert "correct its path" in finding.do


def test_an_object_that_covers_no_pixel_of_the_canvas_is_a_warning(tmp_path: Path) -> None:
    """At 256 pixels the nearest pixel edges of 3 and 5 bins are both the first."""
    paint_all(tmp_path, ["a.png", "b.png"])
    path = write_lines(
        tmp_path / "d.jsonl",
        line("a.png", CAT, box("point", 3, 3, 3, 3), box("thin", 3, 3, 5, 90)),
        line("b.png", box("dot", 2, 2, 6, 6), box("small", 3, 3, 7, 7)),
    )
    assert found(path) == [(1, "too thin to match", True)] * 2
    flat = {"desc": "stick", "poly": [0, 0, 0, 0, 10, 10, 500, 500]}
    bow = {"desc": "bow", "poly": [0, 0, 10, 10, 10, 0, 0, 10]}
    path = write_lines(tmp_path / "polygons.jsonl", line("a.png", flat, bow))
    (report,) = check_files([path], allow_poly=True, lengths=None, canvas=256)
    (finding,) = report.findings
    assert "objects[0] 'stick'" in finding.found


def test_an_image_that_comes_twice_is_a_warning(tmp_path: Path) -> None:
    """Copies under other names are found by their bytes."""
    paint_all(tmp_path, ["a.png", "b.png"])
    (tmp_path / "copy.png").write_bytes((tmp_path / "a.png").read_bytes())
    lines = [line("a.png", CAT), line("b.png"), line("a.png", CAT), line("a.png")]
    train = write_lines(tmp_path / "train.jsonl", *lines)
    val = write_lines(tmp_path / "val.jsonl", line("copy.png", CAT))
    first, second = check(train, val)
    assert [each.kind for each in first.findings] == ["same image in one file"] * 2
    assert first.findings[0].found.endswith("with the same objects")
    assert first.findings[1].found.endswith("with other objects")
    (leak,) = second.findings
    assert (leak.kind, leak.warning) == ("same image in two files", True)
    told = f"image {tmp_path / 'copy.png'} is that of {train}:1, with the same objects"
    assert leak.found == told
    assert [each.kind for each in check(val, val)[1].findings] == ["same image in two files"]


XYWH = "x, y, width, height"
SIZES = [[100 + n, 100, 300 + n, 400] for n in range(8)]
PIXELS = [[5, 5, 640, 480]] * 5  # within 640 and 480 bins by a chance of 0.3 ** 5


@pytest.mark.req("IO-01")
@pytest.mark.parametrize(
    ("boxes", "size", "kind", "do"),
    [
        ([[0.1, 0.2, 0.55, "0.9"]], (640, 480), "scale", "If they are 0..1: x becomes 999 * x"),
        ([[0, 0, 2, 1]], (640, 480), None, ""),
        (PIXELS, (640, 480), "scale", "If they are pixels: x becomes 999 * x / width, "),
        (PIXELS[:3], (640, 480), None, ""),
        ([*PIXELS[:4], [5, 5, 641, 480]], (640, 480), None, ""),
        # No pixels: those of images above 999 cannot be told from bins.
        ([[500, 500, 600, 800]] * 50, (1000, 1200), None, ""),
        (SIZES, (2000, 2000), XYWH, "If they are: write x1, y1, x2, y2"),
        ([*SIZES, [500, 500, 600, 600]], (2000, 2000), None, ""),
        (SIZES[:6], (2000, 2000), None, ""),
        ([*SIZES, *SIZES, [500, 500, 600, 600]], (2000, 2000), XYWH, "If they are: write x1, "),
        ([[700, 700, 90, 80]] * 7, (2000, 2000), XYWH, "If they are: write x1, y1, x2, y2"),
        ([[0, 20, 500, 1000]] * 9, (300, 200), "scale", "If they are 0..1000: x becomes 999 * x /"),
        ([[200, 20, 1900, 1800]] * 9, (2000, 2000), "scale", "If they are pixels: x becomes"),
        ([[1, 2, 900, 1000]] * 2, (1000, 1000), "scale", "If they are 0..1000: x becomes 9"),
        ([*[[500, 500, 600, 800]] * 50, [1, 1, 9, 1300]], (1000, 1200), None, ""),
        ([*[[200, 200, 800, 900]] * 20, [1, 1, 9, 1300]], (4000, 3000), None, ""),
        ([[0.1, 0.1, 0.9, 0.9]] * 9, (640, 480), "scale", "If they are 0..1: x becomes 999 * x"),
    ],
)
def test_coordinates_that_look_like_something_else_than_bins_are_doubted(
    tmp_path: Path, boxes: list[Any], size: tuple[int, int], kind: str | None, do: str
) -> None:
    """The first line with an object has the finding, a problem if boxes are faulty."""
    paint_all(tmp_path, ["none.png"])
    paint(tmp_path / "a.png", size)
    objects = [{"desc": f"cat {n}", "bbox_2d": each} for n, each in enumerate(boxes)]
    lines = line("none.png"), line("a.png", *objects, size=size)
    path = write_lines(tmp_path / "d.jsonl", *lines)
    (report,) = check(path)
    found = [each for each in report.findings if each.kind in ("scale", XYWH)]
    faulty = [each for each in report.findings if each.kind == "geometry"]
    assert [(each.kind, each.where, each.warning) for each in found] == (
        [] if kind is None else [(kind, f"{path}:2", not faulty)]
    )
    assert all(each.do.startswith(do) for each in found)
    assert not any("x becomes" in each.do for each in faulty)


@pytest.mark.req("IO-01")
@pytest.mark.parametrize(
    ("desc", "odd"),
    [
        ("a <bbox>", "<bbox>"),
        ("a\nb", "U+000A (a control character or line break)"),
        ("a\u200bb", "U+200B (zero width space)"),
        ("a\u00a0b", "U+00A0 (no-break space)"),
        (" cat", "space at its ends"),
        ("small <5 cm> cat, café 猫", None),
    ],
)
def test_odd_text_in_a_description_is_named(desc: str, odd: str | None) -> None:
    assert odd_text(desc) == odd


@pytest.fixture
def file_of_cats(tmp_path: Path) -> Path:
    paint_all(tmp_path, ["1.png", "2.png", "3.png"])
    return write_lines(tmp_path / "d.jsonl", *(line(f"{n}.png", *[CAT] * n) for n in (1, 2, 3)))


def test_samples_that_do_not_fit_the_limits_of_a_run_are_warnings(
    file_of_cats: Path, toy_checkpoint: Path
) -> None:
    two = read_samples(file_of_cats, allow_poly=False)[1]
    measured = lengths_of(toy_checkpoint, TokenLimits(0, 0))
    target, prompt = measured.target(two), measured.prompt(two)

    def warned(answer: int, pack: int | None) -> list[tuple[str, str]]:
        lengths = lengths_of(toy_checkpoint, TokenLimits(answer, pack))
        (report,) = check(file_of_cats, lengths=lengths)
        assert all(finding.warning for finding in report.findings)
        return [(f.where[-1], f.kind) for f in report.findings]

    assert warned(target, prompt + target) == [("3", "target too long"), ("3", "sample too long")]
    assert warned(target - 1, None) == [("2", "target too long"), ("3", "target too long")]
    assert warned(10**6, prompt + target - 1) == [(n, "sample too long") for n in "23"]


def test_an_image_the_processor_refuses_is_a_problem(tmp_path: Path, toy_checkpoint: Path) -> None:
    paint(tmp_path / "a.png", (402, 2))
    path = write_lines(tmp_path / "d.jsonl", line("a.png", size=(402, 2)))
    assert found(path) == []
    lengths = lengths_of(toy_checkpoint, TokenLimits(10**6, None))
    (report,) = check(path, lengths=lengths)
    (finding,) = report.findings
    assert (finding.kind, finding.warning) == ("image too narrow", False)


def data(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def refused(*arguments: object) -> tuple[str, str]:
    error = data(*arguments).exception
    assert isinstance(error, ContractError)
    assert error.do
    return error.where, error.found


def words(text: str) -> list[list[str]]:
    return [row.split() for row in text.splitlines()]


@pytest.mark.req("ARCH-01")
def test_reading_data_loads_no_torch(run_yaml: RunYaml, toy_data: ToyData) -> None:
    """Neither to check files nor to count the tokens of a run."""
    check = command("learner.cli", "data", "check", str(toy_data.val_jsonl))
    look = command("learner.cli", "data", "look", "--config", str(run_yaml()))
    assert (check.code, look.code) == (0, 0), check.stderr + look.stderr
    assert check.heavy <= {"numpy"}
    assert "torch" not in look.heavy


def test_problems_end_with_2_and_a_limit_cuts_what_is_told_not_what_is_counted(
    tmp_path: Path,
) -> None:
    paint_all(tmp_path, ["a.png"])
    path = write_lines(tmp_path / "d.jsonl", line("a.png"), "{", line("a.png"), "")
    ended = data("check", path, "--limit", 1)
    assert ended.exit_code == 2
    told = ended.stderr.splitlines()
    assert (told[0], told[-1]) == (f"error: {path}:2", "... and 2 more")
    assert len(told) == 4
    assert words(ended.stdout)[1][1:] == ["2", "0", "2", "1"]
    assert len(words(ended.stdout)) == 7


def test_files_of_a_run_are_checked_by_its_limits(run_yaml: RunYaml, toy_data: ToyData) -> None:
    """The small run generates at most 16 tokens, fewer than any answer has."""
    ended = data("check", "--config", run_yaml())
    assert ended.exit_code == 0
    assert [row[0] for row in words(ended.stdout)[1:3]] == [
        str(toy_data.train_jsonl),
        str(toy_data.val_jsonl),
    ]
    assert words(ended.stdout)[-1] == ["28", "warning", "target", "too", "long"]


@pytest.mark.parametrize("name", ["check", "look"])
def test_data_files_or_a_config_are_needed(name: str, run_yaml: RunYaml) -> None:
    assert refused(name) == ("--config", "no data file")
    both = refused(name, "d.jsonl", "--config", run_yaml())
    assert both == ("--config", "data files beside it")


def test_a_conversion_overwrites_nothing_and_needs_a_folder_of_images(
    toy_data: ToyData, tmp_path: Path
) -> None:
    out = tmp_path / "d.jsonl"
    images = toy_data.train_jsonl.parent
    command = ("convert", "--from", "coco", toy_data.coco_val, out, "--images")
    assert refused(*command, out) == ("--images", f"{out} is no folder")
    out.write_text("kept")
    assert refused(*command, images) == ("OUT", f"{out} exists already")
    assert out.read_text() == "kept"
    left_out = refused("convert", toy_data.coco_val, tmp_path / "new.jsonl", "--left-out", out)
    assert left_out == ("--left-out", f"{out} exists already")


@pytest.mark.parametrize("path", ["d.jsonl/x/y", "/proc/x/y", "n" * 300])
def test_an_output_that_cannot_be_made_is_refused_before_any_work(
    toy_data: ToyData, tmp_path: Path, path: str
) -> None:
    broken = write_lines(tmp_path / "d.jsonl", "{")
    out = tmp_path / path
    for option, arguments in (
        ("OUT", ("convert", "--from", "coco", broken, out)),
        (str(out), ("look", broken, "--out", out)),
    ):
        where, found = refused(*arguments)
        assert where == option
        assert found.startswith(f"{out} cannot be made (")
    with pytest.raises(ContractError, match="cannot be made"):
        make_data(out, 1, 1, 0)


def test_what_is_piped_is_plain_and_whole(tmp_path: Path) -> None:
    paint_all(tmp_path, ["a.png"])
    long = box("[bold]" + "very " * 20 + "long", 0, 0, 99, 99)
    ended = data("look", write_lines(tmp_path / "d.jsonl", line("a.png", long)))
    assert "\x1b" not in ended.stdout
    assert "1  100.0%  [bold]" + "very " * 20 + "long" in ended.stdout


def test_samples_are_shown(toy_data: ToyData, tmp_path: Path) -> None:
    for arguments, count in (([], 16), (["--samples", 3], 3), (["--lines", "24, 3,3"], 2)):
        out = tmp_path / str(count)
        ended = data("look", toy_data.train_jsonl, "--out", out, *arguments)
        assert (ended.exit_code, ended.stderr) == (0, "")
        assert ended.stdout.endswith(f"\nPage of {count} samples: {out / 'index.html'}\n")
        assert len(list(out.glob("*.png"))) == count
    assert sorted(path.name for path in out.glob("*.png")) == ["train-00003.png", "train-00024.png"]


def test_lines_that_are_none_are_refused(toy_data: ToyData, tmp_path: Path) -> None:
    out = tmp_path / "out"
    start = ("look", toy_data.val_jsonl, "--out", out)
    assert refused(*start, "--lines", "5") == ("--lines", "there is no line '5'")
    assert refused(*start, toy_data.train_jsonl)[0] == "--out"
    assert not out.exists()
    (tmp_path / "kept").touch()
    where, _ = refused("look", toy_data.val_jsonl, "--out", tmp_path)
    assert where == str(tmp_path)
