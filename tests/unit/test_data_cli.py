"""The commands of `learner data`: exit codes, three-part errors, nothing heavy or half done."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from learner.cli import app
from learner.config import dump_mapping
from learner.data.toy import ToyData, make_data
from shared_contracts.errors import ContractError
from tests.unit.data_files import box, line, paint_all, write_lines
from tests.unit.small_run import small_mapping
from tests.unit.test_learner_cli import command

pytestmark = pytest.mark.req("DATA-01")

CAT = box("cat", 10, 20, 300, 400)


def data(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def refused(*arguments: object) -> tuple[str, str]:
    """Where and what was found, of a command that ends with one error."""
    error = data(*arguments).exception
    assert isinstance(error, ContractError)
    assert error.do
    return error.where, error.found


def words(text: str) -> list[list[str]]:
    return [row.split() for row in text.splitlines()]


@pytest.fixture
def run_yaml(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Path:
    mapping = small_mapping(toy_checkpoint, toy_data, tmp_path / "run")
    path = tmp_path / "run.yaml"
    path.write_text(dump_mapping(mapping))
    return path


@pytest.mark.req("ARCH-01")
def test_reading_data_loads_no_torch(run_yaml: Path, toy_data: ToyData) -> None:
    """Neither to check files nor to count the tokens of a run."""
    check = command("learner.cli", "data", "check", str(toy_data.val_jsonl))
    look = command("learner.cli", "data", "look", "--config", str(run_yaml))
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


def test_the_files_of_a_run_are_checked_against_its_limits(
    run_yaml: Path, toy_data: ToyData
) -> None:
    """The small run generates at most 16 tokens, fewer than any answer has."""
    ended = data("check", "--config", run_yaml)
    assert ended.exit_code == 0
    assert [row[0] for row in words(ended.stdout)[1:3]] == [
        str(toy_data.train_jsonl),
        str(toy_data.val_jsonl),
    ]
    assert words(ended.stdout)[-1] == ["28", "warning", "target", "too", "long"]


@pytest.mark.parametrize("name", ["check", "look"])
def test_data_files_or_a_config_are_needed(name: str, run_yaml: Path) -> None:
    assert refused(name) == ("--config", "no data file")
    both = refused(name, "d.jsonl", "--config", run_yaml)
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
