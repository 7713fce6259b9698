"""`learner config show` and `check`, and the origin of every value (CFG-10)."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from learner.cli import app
from learner.config import dump_mapping, load_config, load_mapping, merge
from learner.config.load import show_config
from tests.unit.config_faults import CONFIGS, SHIPPED, config_name, written
from tests.unit.small_run import RunYaml

pytestmark = pytest.mark.req("CFG-10")

PROFILES = CONFIGS / "stage2_two_channel"
WARMUP = CONFIGS / "demo" / "warmup.yaml"


def cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in arguments])


def line_of(path: Path, text: str) -> str:
    """`file:line` of the one line of a file that starts with this text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.lstrip(" -").startswith(text)]
    return f"{path}:{number}"


def notes(text: str) -> dict[str, str]:
    """The comment beside each key of `learner config show`; the last of equal keys."""
    return dict(re.findall(r"^[ -]*(\w+):.* # (.*)$", text, re.MULTILINE))


# --- show -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=config_name)
def test_a_shown_config_is_equal_and_every_value_has_the_line_that_sets_it(
    path: Path, tmp_path: Path
) -> None:
    shown, values = show_config(path), 0
    assert load_config(written(tmp_path / "shown.yaml", shown)) == load_config(path)
    for line in shown.splitlines():
        found = re.fullmatch(r"[ -]*(\w+):( .*?)? +# (?:default|derived|(.*):(\d+))", line)
        if found and found[3]:
            source = Path(found[3]).read_text(encoding="utf-8").splitlines()[int(found[4]) - 1]
            assert source.lstrip(" -").startswith(f"{found[1]}:")
        else:  # a section
            assert found or re.fullmatch(r"[ -]*\w+:", line), line
        values += found is not None
    assert values > 90


def test_a_value_comes_from_the_leaf_the_base_a_default_or_another_key(tmp_path: Path) -> None:
    leaf, base = PROFILES / "smoke" / "default.yaml", PROFILES / "base.yaml"
    beside = notes(show_config(leaf))
    assert beside["b_ratio"] == line_of(leaf, "b_ratio:")
    assert beside["warmup_ratio"] == line_of(base, "warmup_ratio:")
    assert beside["gradient_accumulation_steps"] == "default"
    beside = notes(show_config(leaf, all_origins=True))
    assert beside["b_ratio"] == f"{line_of(leaf, 'b_ratio:')} over {line_of(base, 'b_ratio:')}"
    mapping = merge(load_mapping(WARMUP), {"training": {"vit_lr": None, "aligner_lr": 0.5}})
    path = written(tmp_path / "run.yaml", dump_mapping(mapping))
    beside = notes(show_config(path))
    assert beside["vit_lr"] == beside["logging_dir"] == "derived"
    assert beside["aligner_lr"] == line_of(path, "aligner_lr:")


def test_show_prints_the_config() -> None:
    plain = cli("config", "show", "--config", WARMUP)
    assert (plain.exit_code, plain.stdout) == (0, show_config(WARMUP))


# --- check ------------------------------------------------------------------------------


@pytest.mark.req("CFG-04")
def test_check_reports_every_problem_of_every_file_with_its_line(tmp_path: Path) -> None:
    """The line is in the file of the chain that has the fault."""
    base = load_mapping(WARMUP)
    boxes = base["stage2_ab"]["pipeline"]["objective"][1]["config"]
    boxes["ciou_weight"] = -1
    del boxes["smoothl1_weight"]
    base["training"]["max_steps"] = 0
    bottom = written(tmp_path / "base.yaml", dump_mapping(base))
    leaf = "extends: ../base.yaml\ntraining:\n  max_steps: many\n  max_step: 1\n"
    one = written(tmp_path / "sub" / "leaf.yaml", leaf)
    other = written(tmp_path / "other.yaml", f"extends: {WARMUP}\nmodle: 1\n")
    none = tmp_path / "none.yaml"
    done = cli("config", "check", "--keys-only", one, other, *SHIPPED, none)
    assert done.exit_code == 2
    assert done.stdout == "".join(f"{path}: valid\n" for path in SHIPPED)
    entry, line = "stage2_ab.pipeline.objective[1].config", line_of(bottom, "ciou_weight:")
    above = f"{bottom}:{int(line.rpartition(':')[2]) - 1}"
    told = [line for line in done.stderr.splitlines() if not line.startswith("  do:")]
    assert told[0] == f"{one}: 4 problems"
    assert dict(zip(told[1:9:2], told[2:10:2], strict=True)) == {
        "error: training.max_steps": f'  found: "many" is not accepted ({one}:3)',
        "error: training.max_step": f"  found: unknown key ({one}:4)",
        f"error: {entry}.ciou_weight": f"  found: -1 is not accepted ({line})",
        f"error: {entry}.smoothl1_weight": "  found: this key is required and missing "
        f"({entry}: {above})",
    }
    assert told[9:] == [
        f"{other}: 1 problem",
        "error: modle",
        f"  found: unknown key ({other}:2)",
        f"{none}: 1 problem",
        f"error: {none}",
        "  found: cannot be read (No such file or directory)",
    ]


# --- The files that a YAML names --------------------------------------------------------


def test_check_reports_every_missing_file_with_its_line(run_yaml: RunYaml, tmp_path: Path) -> None:
    good = cli("config", "check", run_yaml())
    assert (good.exit_code, good.stdout) == (0, f"{tmp_path / 'run.yaml'}: valid\n")
    assert not (tmp_path / "run").exists()
    file = written(tmp_path / "file", "kept")
    other = written(tmp_path / "other.jsonl", '{"image": "a.png", "objects": [{"label": "cat"}]}')
    path = run_yaml(
        model={"model": str(tmp_path / "none")},
        data={"train_jsonl": str(tmp_path / "no.jsonl"), "val_jsonl": str(other)},
        training={"output_dir": str(file)},
    )
    bad = cli("config", "check", path)
    assert (bad.exit_code, bad.stdout) == (2, "")
    assert bad.stderr.startswith(f"{path}: 5 problems\n")
    for key, found in {
        "training.output_dir": f"{file} cannot be written to (Not a directory: {file})",
        "model.model": f"there is no folder {tmp_path / 'none'}",
        "data.train_jsonl": f"{tmp_path / 'no.jsonl'}: there is no such file",
        "data.val_jsonl": f"{other}: this is qwen",
    }.items():
        line = line_of(path, f"{key.partition('.')[2]}: ")
        assert re.search(
            rf"error: {key}\n  found: {re.escape(found)}.*\({re.escape(line)}\)", bad.stderr
        )
    assert f"hf download OWNER/NAME --local-dir {tmp_path / 'none'}" in bad.stderr
    only_keys = cli("config", "check", "--keys-only", path)
    assert (only_keys.exit_code, only_keys.stderr) == (0, "")


TUNER = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 2}


@pytest.mark.parametrize(
    ("sections", "errors", "message"),
    [
        (
            {"tuner": TUNER | {"target_modules": ["q_proj", "q_prj", ".*k_proj"]}},
            2,
            'error: tuner.target_modules[2]\n  found: ".*k_proj" is the end of no',
        ),
        ({"tuner": TUNER | {"target_modules": ["q_proj", "layers.0.self_attn.v_proj"]}}, 0, ""),
        (
            {"tuner": TUNER | {"target_modules": ["q_proj", "lm_head"]}},
            1,
            "error: tuner.target_modules\n  found: names the embedding or the head, which share",
        ),
    ],
    ids=["modules that are not there", "modules that are there", "a tied head"],
)
def test_check_reads_the_checkpoint(
    run_yaml: RunYaml, sections: dict[str, Any], errors: int, message: str
) -> None:
    done = cli("config", "check", run_yaml(**sections))
    assert (done.exit_code, done.stderr.count("error: ")) == (2 if errors else 0, errors)
    assert message in done.stderr
