"""The checks of `learner doctor` that read files, how findings are shown, and the whole."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from learner.config.schema import Config, LoraTuner
from learner.data.toy import ToyData
from learner.operate.doctor import inputs, memory
from learner.operate.doctor.findings import Finding, as_json, of_error, ok, skipped, summary, tables
from learner.operate.doctor.run import examine
from learner.operate.estimate.sizes import read_sizes
from learner.training.start_checks import longest_prompt
from shared_contracts.errors import ContractError, ContractErrors
from tests.unit.findings import by_check, worst
from tests.unit.small_run import small_config

URL = "http://serve-0:8000"

pytestmark = pytest.mark.req("DEP-03")


@pytest.fixture
def config(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Config:
    return small_config(toy_checkpoint, toy_data, tmp_path / "run")


# --- findings


def test_several_errors_are_told_one_by_one_up_to_a_few() -> None:
    errors = ContractErrors([ContractError(f"a:{i}", "bad", "mend it") for i in range(7)])
    findings = of_error("data", errors)
    assert [f.about for f in findings] == ["a:0", "a:1", "a:2", "a:3", "a:4", ""]
    assert findings[-1].found == "2 more of 7"
    assert {f.status for f in findings} == {"fail"}
    assert of_error("data", ContractError("a", "b", "c"), "about")[0].about == "about"


# --- files


def test_files_that_hold_are_counted(config: Config) -> None:
    looked = inputs.look(config)
    assert worst(looked.findings) == "ok"
    found = by_check(looked.findings)
    assert [f.found for f in looked.findings if f.check == "data"] == ["24 samples", "4 samples"]
    assert found["images"].found == "28 of 28 decoded"
    assert found["run"].found.startswith("3 steps into ")
    assert looked.whole is not None
    assert len(looked.samples) == 24


@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_the_longest_prompt_is_measured_where_servers_are_asked(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, backend: str
) -> None:
    config = small_config(
        toy_checkpoint,
        toy_data,
        tmp_path,
        stage2_ab={"schedule": {"b_ratio": 0.5}},
        rollout_matching={"rollout_backend": backend},
    )
    looked = inputs.look(config)
    longest = longest_prompt(config, looked.samples)
    assert longest > 0
    assert looked.longest_prompt == (longest if backend == "vllm" else None)


def test_a_checkpoint_whose_prompts_cannot_be_measured_is_named(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    shutil.copytree(toy_checkpoint, tmp_path / "model")
    own: dict[str, Any] = {"stage2_ab": {"schedule": {"b_ratio": 0.5}}}
    config = small_config(tmp_path / "model", toy_data, tmp_path / "run", **own)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    looked = inputs.look(config)
    assert by_check(looked.findings)["checkpoint"].status == "fail"
    assert (looked.longest_prompt, looked.has_checkpoint) == (None, False)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    image = tmp_path / "broken.png"
    image.write_bytes(b"no image")
    return image


def trained_on(config: Config, toy_data: ToyData, folder: Path, images: list[Path]) -> Config:
    """Four times the first sample, with these images."""
    line = json.loads(toy_data.train_jsonl.read_text().splitlines()[0])
    data = folder / "train.jsonl"
    data.write_text((json.dumps({**line, "images": [str(image) for image in images]}) + "\n") * 4)
    return config.model_copy(update={"data": config.data.model_copy(update={"train_jsonl": data})})


def test_a_broken_image_is_named_and_the_rest_goes_on(
    config: Config, toy_data: ToyData, tmp_path: Path, broken: Path
) -> None:
    looked = inputs.look(trained_on(config, toy_data, tmp_path, [broken]))
    found = by_check(looked.findings)
    assert found["images"].status == "fail"
    assert found["images"].about == str(broken)
    assert "no image of a known format" in found["images"].found
    assert found["run"].status == "fail"  # it would not start
    assert {f.about for f in looked.findings if f.check == "run"} == {
        f"{tmp_path / 'train.jsonl'}:{line}" for line in range(1, 5)
    }
    assert found["data"].status == "ok"


def test_a_broken_second_image_costs_the_estimate_alone(
    config: Config, toy_data: ToyData, tmp_path: Path, broken: Path
) -> None:
    whole = toy_data.train_jsonl.parent / "images" / "train" / "00000.png"
    own = trained_on(config, toy_data, tmp_path, [whole, broken])
    looked = inputs.look(own)
    assert by_check(looked.findings)["images"].about == str(broken)
    found = by_check(memory.weigh(own, looked, [], None, None).findings)
    assert (found["weights"].status, found[memory.LEARNER].status) == ("ok", "skipped")


def test_each_file_that_is_wrong_is_told_and_what_waits_for_it(
    config: Config, tmp_path: Path
) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"images": []}\n')
    wrong = {
        "data": config.data.model_copy(update={"train_jsonl": data}),
        "model": config.model.model_copy(update={"model": tmp_path / "nowhere"}),
    }
    looked = inputs.look(config.model_copy(update=wrong))
    found = by_check(looked.findings)
    assert (found["checkpoint"].status, found["data"].status) == ("fail", "fail")
    assert found["data"].about == f"{data}:1"
    assert (found["images"].status, found["run"].status) == ("ok", "skipped")
    assert (looked.has_checkpoint, looked.samples) == (False, [])


def test_a_run_folder_that_holds_another_run_is_a_finding(config: Config) -> None:
    folder = Path(config.training.output_dir)
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("{}\n")
    looked = inputs.look(config)
    found = by_check(looked.findings)
    assert (found["checkpoint"].status, found["data"].status) == ("ok", "ok")
    assert found["run"].status == "fail"
    assert len(looked.samples) == 24


def test_images_are_spread_over_the_data() -> None:
    assert inputs.spread(list(range(10)), 3) == [0, 3, 6]
    assert inputs.spread([1, 2], 5) == [1, 2]
    assert inputs.spread([], 5) == []


# --- the whole


def test_without_servers_it_says_what_is_looked_at_instead(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    some: dict[str, Any] = {"stage2_ab": {"schedule": {"b_ratio": 0.5}}}
    own: dict[str, Any] = {"rollout_matching": {"vllm": {"mode": "colocate", "server": None}}}
    hf: dict[str, Any] = {"rollout_matching": {"rollout_backend": "hf"}}
    none: dict[str, Any] = {}
    cases = ((none, "no rollouts"), (some | own, "colocate"), (some | hf, "hf generates"))
    for number, (sections, says) in enumerate(cases):
        config = small_config(toy_checkpoint, toy_data, tmp_path / str(number), **sections)
        findings = list(examine(config))
        found = by_check(findings)
        rows = found["coordinate rows"]
        assert "look untrained" in rows.found
        assert (rows.status, "b_ratio" in rows.do) == (
            ("warn", True) if sections else ("ok", False)
        )
        assert [f for f in findings if f.status in ("warn", "fail") and f is not rows] == []
        assert found["servers"].status == "skipped"
        assert says in found["servers"].found
        assert ("server memory (estimate)" in found) == (says == "colocate")


def test_findings_are_shown_to_a_person_and_to_a_script() -> None:
    findings = [
        ok("data", "4 samples", "train.jsonl"),
        Finding("token", URL, "fail", "there is none", "Set it"),
        skipped("media", "waits for token", URL),
        skipped("rollout", "waits for token", URL),
    ]
    console = Console(width=90, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables(findings):
        console.print(table)
    text = console.export_text()
    for part in ("This machine", "train.jsonl: 4 samples", URL, "-> Set it", "media, rollout"):
        assert part in text
    assert text.count("waits for token") == 1
    assert summary(findings) == "1 ok, 0 warn, 1 fail, 2 skipped"
    document = json.loads(as_json(findings))
    assert document["failed"] is True
    assert [each["status"] for each in document["findings"]] == ["ok", "fail", "skipped", "skipped"]


def test_logins_of_trackers_are_looked_for_here(config: Config, tmp_path: Path) -> None:
    reporting = config.model_copy(
        update={"training": config.training.model_copy(update={"report_to": ("wandb", "mlflow")})}
    )
    (missing,) = inputs.trackers(reporting, {}, tmp_path)
    assert (missing.status, missing.about) == ("warn", "training.report_to[0]")
    assert "WANDB_API_KEY, ~/.netrc" in missing.found
    assert "set WANDB_MODE to offline" in missing.do
    (tmp_path / ".netrc").write_text("machine example.org password x\n")
    assert worst(inputs.trackers(reporting, {}, tmp_path)) == "warn"
    for environment in ({"WANDB_MODE": "offline"}, {"WANDB_API_KEY": "x"}):
        assert worst(inputs.trackers(reporting, environment, tmp_path)) == "ok"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    assert worst(inputs.trackers(reporting, {}, tmp_path)) == "ok"


@pytest.mark.req("FULL-03")
def test_a_host_on_which_the_processes_cannot_load_the_model_is_told(config: Config) -> None:
    """Each has it whole in float32, under LoRA in 16 bits, also where FSDP2 will split it."""
    counted = read_sizes(config)
    lora = LoraTuner(train_type="lora", lora_rank=4, lora_alpha=8)
    low = config.model.model_copy(update={"torch_dtype": "bfloat16"})
    frozen = config.model_copy(update={"tuner": lora, "model": low})
    for of, size in ((config, 4), (frozen, 2)):
        needed = 4 * size * counted.parameters
        assert memory.judge_loading(of, counted, 4, needed) is None
        finding = memory.judge_loading(of, counted, 4, needed - 1)
        assert finding is not None
        assert finding.status == "fail"
        assert finding.found.startswith("4 learner processes load ")
    assert memory.judge_loading(config, counted, 4, None) is None


def test_checkpoints_that_do_not_fit_on_the_disk_are_told(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = read_sizes(config)
    each = memory.checkpoint_bytes(config, counted)
    assert each > 12 * counted.parameters
    every_step = config.training.model_copy(update={"save_steps": 1, "save_total_limit": 1})
    often = config.model_copy(update={"training": every_step})
    for of, kept in ((config, 1), (often, 2)):
        for free, status in ((kept * each, "ok"), (kept * each - 1, "fail")):
            monkeypatch.setattr(
                shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free)
            )
            finding = memory.judge_disk(of, counted, 24)
            assert (finding.status, finding.found.split()[0]) == (status, str(kept))
