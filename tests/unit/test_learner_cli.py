"""The learner's command line on bad input: three parts, exit code 2, nothing expensive."""

import inspect
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import learner.cli
import learner.commands.run
import learner.training.start_checks
from learner.config import Config, dump_mapping
from learner.data.toy import ToyData
from learner.training.start_checks import RunInputs
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.server_info import Info
from tests.unit.scripted_server import info, problem, scripted_server
from tests.unit.small_run import small_mapping

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "transformers", "fastapi", "numpy", "peft")
HELP_SECONDS = 1.0


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, its errors by part, and what it had imported."""

    code: int
    stderr: str
    heavy: set[str]

    @property
    def parts(self) -> tuple[str, str, str]:
        """Where, found and do of the one error."""
        lines = self.stderr.splitlines()
        assert len(lines) == 3, self.stderr
        where, found, do = lines
        return (
            where.removeprefix("error: "),
            found.removeprefix("  found: "),
            do.removeprefix("  do: "),
        )


def command(module: str, *arguments: str) -> Ended:
    """Run the console script's function in a fresh interpreter."""
    program = f"""
import sys
sys.argv = ["command", *{list(arguments)!r}]
from {module} import main
try:
    main()
finally:
    print("loaded:", *sorted(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    heavy = done.stdout.splitlines()[-1].removeprefix("loaded:").split()
    return Ended(done.returncode, done.stderr, set(heavy))


class Run:
    """A config file in a folder of its own, and what `learner train` says to it."""

    def __init__(self, mapping: dict[str, Any], folder: Path) -> None:
        self.mapping = mapping
        self.folder = folder
        self.output = Path(mapping["training"]["output_dir"])

    def train(self) -> Ended:
        file = self.folder / "run.yaml"
        file.write_text(dump_mapping(self.mapping))
        ended = command("learner.cli", "train", "--config", str(file))
        assert not self.output.exists(), "no run folder before the input is known to be good"
        return ended


@pytest.fixture
def run(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Run:
    return Run(small_mapping(toy_checkpoint, toy_data, tmp_path / "out"), tmp_path)


@pytest.fixture
def lines(run: Run, toy_data: ToyData) -> list[dict[str, Any]]:
    """Lines of the training file, with absolute image paths, for `write`."""
    records = [json.loads(line) for line in toy_data.train_jsonl.read_text().splitlines()]
    for record in records:
        record["images"] = [str(toy_data.train_jsonl.parent / name) for name in record["images"]]
    run.mapping["data"]["train_jsonl"] = str(run.folder / "train.jsonl")
    return records


def write(run: Run, lines: list[dict[str, Any]]) -> Path:
    path = Path(run.mapping["data"]["train_jsonl"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.req("CFG-02")
def test_unknown_keys_are_told_all_at_once(run: Run) -> None:
    run.mapping["training"]["learning_rat"] = 1
    run.mapping["rollout_matching"]["vllm"]["server"]["servers"][0]["unknown_flag"] = 1
    ended = run.train()
    assert ended.code == 2
    assert "error: training.learning_rat\n  found: unknown key (" in ended.stderr
    assert "'learning_rate'" in ended.stderr
    assert "error: rollout_matching.vllm.server.servers[0].unknown_flag\n" in ended.stderr
    assert ended.heavy == set()


@pytest.mark.req("CFG-09", "CFG-10")
@pytest.mark.parametrize(
    "words",
    [("config", "show"), ("config", "check", "--keys-only"), ("preflight", "--config")],
    ids=" ".join,
)
def test_looking_at_a_config_loads_nothing_heavy(words: tuple[str, ...]) -> None:
    good = command("learner.cli", *words, "configs/demo/warmup.yaml")
    assert (good.code, good.stderr, good.heavy) == (0, "", set())
    bad = command("learner.cli", *words, "configs/none.yaml")
    assert (bad.code, bad.heavy) == (2, set())
    assert "error: configs/none.yaml" in bad.stderr


@pytest.mark.req("CFG-10")
def test_the_schema_is_made_without_anything_heavy() -> None:
    ended = command("learner.cli", "config", "schema")
    assert (ended.code, ended.stderr, ended.heavy) == (0, "", set())


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    ended = command("learner.cli", "train", "--config", str(tmp_path / "none.yaml"))
    assert ended.code == 2
    assert ended.parts[0] == str(tmp_path / "none.yaml")
    assert ended.heavy == set()


@pytest.mark.req("DATA-01")
def test_a_missing_data_file_is_named(run: Run) -> None:
    run.mapping["data"]["train_jsonl"] = str(run.folder / "none.jsonl")
    ended = run.train()
    assert ended.code == 2
    where, found, _ = ended.parts
    assert (where, found) == (str(run.folder / "none.jsonl"), "there is no such file")
    assert "torch" not in ended.heavy


@pytest.mark.req("DATA-01")
def test_a_malformed_line_is_named_by_file_and_number(
    run: Run, lines: list[dict[str, Any]]
) -> None:
    path = write(run, lines)
    path.write_text(path.read_text() + "{not json\n")
    ended = run.train()
    assert ended.code == 2
    where, found, _ = ended.parts
    assert where == f"{path}:{len(lines) + 1}"
    assert found.startswith("not JSON")
    assert "torch" not in ended.heavy


@pytest.mark.req("DATA-01")
def test_a_missing_image_is_named_with_its_line(run: Run, lines: list[dict[str, Any]]) -> None:
    lines[1]["images"] = ["gone.png"]
    path = write(run, lines)
    ended = run.train()
    assert ended.code == 2
    where, found, _ = ended.parts
    assert where == f"{path}:2"
    assert "gone.png" in found
    assert "torch" not in ended.heavy


@pytest.mark.req("DATA-01")
def test_a_description_that_would_end_the_answer_is_refused(
    run: Run, lines: list[dict[str, Any]]
) -> None:
    lines[2]["objects"][0]["desc"] = "a <|im_end|> sign"
    path = write(run, lines)
    ended = run.train()
    assert ended.code == 2
    where, found, _ = ended.parts
    assert where == f"{path}:3"
    assert "<|im_end|>" in found


def without_tokens(checkpoint: Path, folder: Path, *tokens: str) -> Path:
    """A copy of the tokenizer in which these added tokens are ordinary words."""
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] not in tokens]
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {k: v for k, v in vocab.items() if k not in tokens}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_model_without_coordinate_tokens_is_told_how_to_get_them(
    run: Run, toy_checkpoint: Path
) -> None:
    missing = [f"<|coord_{k}|>" for k in range(3, 1000)]
    run.mapping["model"]["model"] = str(without_tokens(toy_checkpoint, run.folder, *missing))
    ended = run.train()
    assert ended.code == 2
    where, found, do = ended.parts
    assert where == "model.model"
    assert "lacks 997 of the 1000 coordinate tokens, first <|coord_3|>" in found
    assert "--expand-vocab" in do
    assert not ended.heavy & {"torch", "transformers"}


def test_a_model_without_an_end_of_turn_is_refused(run: Run, toy_checkpoint: Path) -> None:
    run.mapping["model"]["model"] = str(without_tokens(toy_checkpoint, run.folder, "<|im_end|>"))
    ended = run.train()
    assert (ended.code, ended.parts[0]) == (2, "model.model")
    assert "<|im_end|>" in ended.parts[1]


def test_a_model_folder_that_is_none_is_refused(run: Run) -> None:
    run.mapping["model"]["model"] = str(run.folder)
    ended = run.train()
    assert (ended.code, ended.parts[0]) == (2, "model.model")
    assert "config.json" in ended.parts[1]


@pytest.mark.req("CFG-07")
def test_a_step_larger_than_the_data_is_refused(run: Run) -> None:
    run.mapping["training"]["effective_batch_size"] = 25
    ended = run.train()
    assert (ended.code, ended.parts[0]) == (2, "training.effective_batch_size")
    assert "there are 24" in ended.parts[1]


@pytest.mark.req("PACK-01")
def test_a_buffer_smaller_than_a_step_is_refused(run: Run) -> None:
    run.mapping["training"]["packing_buffer"] = 3
    ended = run.train()
    assert (ended.code, ended.parts[0]) == (2, "training.packing_buffer")


@pytest.mark.slow
def test_several_learner_processes_that_torchrun_has_not_started_are_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = run.train()
    assert (ended.code, ended.parts[0]) == (2, "WORLD_SIZE")


def with_server(run: Run, base_url: str, timeout_s: float) -> None:
    run.mapping["stage2_ab"]["schedule"]["b_ratio"] = 0.5
    run.mapping["rollout_matching"]["vllm"]["server"] = {
        "servers": [{"base_url": base_url, "group_port": 51216}],
        "timeout_s": timeout_s,
    }


def colocated(run: Run, **vllm: Any) -> None:
    run.mapping["stage2_ab"]["schedule"]["b_ratio"] = 0.5
    run.mapping["rollout_matching"]["vllm"] = vllm


@pytest.mark.req("ROLL-03")
def test_a_colocated_server_on_more_gpus_than_there_are_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    colocated(run, tensor_parallel_size=2)
    ended = run.train()
    assert ended.code == 2
    assert ended.parts[0] == "rollout_matching.vllm.tensor_parallel_size"
    assert not ended.heavy & {"torch", "transformers"}


@pytest.mark.req("ROLL-03")
def test_beside_a_colocated_server_on_several_gpus_the_learner_sees_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with three GPUs, as far as the code before torch can tell."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(learner.training.start_checks, "visible_gpus", lambda *_: [3, 1, 2])
    seen: list[tuple[str, tuple[int, ...]]] = []

    def train(config: Config, inputs: RunInputs, *_: Any) -> Path:
        assert inputs.placement is not None
        seen.append((os.environ["CUDA_VISIBLE_DEVICES"], inputs.placement.gpus))
        return Path(config.training.output_dir)

    monkeypatch.setitem(sys.modules, "learner.training.train", SimpleNamespace(train=train))
    colocated(run)
    file = run.folder / "run.yaml"
    file.write_text(dump_mapping(run.mapping))
    learner.commands.run.train(file)
    assert seen == [("3", (3, 1))]


@pytest.mark.req("SYNC-01", "RES-04")
def test_adapters_of_several_learner_processes_are_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    run.mapping["tuner"] = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
    colocated(run, enable_lora=True, sync={"mode": "auto"})
    ended = run.train()
    assert (ended.code, ended.parts[0]) == (2, "rollout_matching.vllm.sync.mode")
    assert not ended.heavy & {"torch", "transformers"}


@pytest.mark.req("SYNC-04")
def test_a_server_that_is_not_there_is_named_in_time(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        base_url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with_server(run, base_url, timeout_s=0.5)
    started = time.monotonic()
    ended = run.train()
    assert time.monotonic() - started < 15.0
    assert ended.code == 2
    where, found, do = ended.parts
    assert where == f"GET {base_url}/health/"
    assert "Connection refused" in found
    assert "rollout-server serve" in do
    assert not ended.heavy & {"torch", "transformers"}


@pytest.mark.req("SYNC-04")
def test_a_server_that_is_not_ready_tells_why(run: Run) -> None:
    with scripted_server() as server:
        server.routes["GET /health/"] = lambda _: problem(
            "not-ready", "the engines are starting", "replicas"
        )
        with_server(run, server.base_url, timeout_s=0.5)
        ended = run.train()
    assert ended.code == 2
    assert "the engines are starting" in ended.parts[1]


GUARD = RepeatTerminateConfig(enabled=True, min_new_tokens=8, max_object_keys=40)
OTHER_GUARD = RepeatTerminateConfig(enabled=True, min_new_tokens=8, max_object_keys=30)
OF_LINES = GUARD.model_copy(update={"answer_format": "compact"})


def against(run: Run, answer: Info) -> tuple[Ended, str]:
    """What the learner says to a server with this `/info/`, and the server's address."""
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: answer
        with_server(run, server.base_url, timeout_s=20.0)
        return run.train(), server.base_url


@pytest.mark.req("REP-06")
@pytest.mark.parametrize(
    ("ours", "answer", "there"),
    [
        (GUARD, info(), "guard is off"),
        (GUARD, info(GUARD, active=False), "configured but inactive"),
        (GUARD, info(OTHER_GUARD), '"max_object_keys":30'),
        (GUARD, info(OF_LINES), '"answer_format":"compact"'),
        (RepeatTerminateConfig(), info(GUARD), '"max_object_keys":40'),
    ],
    ids=["without", "inactive", "other settings", "other format", "ours is off"],
)
def test_a_server_whose_repeat_guard_is_not_ours_is_refused(
    run: Run, ours: RepeatTerminateConfig, answer: Info, there: str
) -> None:
    run.mapping["rollout_matching"]["repeat_terminate"] = ours.model_dump()
    ended, base_url = against(run, answer)
    assert ended.code == 2
    where, found, do = ended.parts
    assert where == f"GET {base_url}/info/ repeat_terminate"
    assert there in found
    assert ("repeat_terminate is off" in found) != ours.enabled
    assert "--run-config" in do
    assert not ended.heavy & {"torch", "transformers"}


@pytest.mark.req("SRV-03")
def test_a_server_that_decodes_fewer_than_the_batch_is_refused(run: Run) -> None:
    run.mapping["rollout_matching"]["decode_batch_size"] = 12
    ended, base_url = against(run, info(max_num_seqs=11))
    assert ended.code == 2
    where, found, do = ended.parts
    assert where == f"GET {base_url}/info/ max_num_seqs"
    assert "11" in found
    assert "decode_batch_size 12" in found
    assert "--run-config" in do


@pytest.mark.req("SYNC-01")
def test_a_server_without_adapters_is_refused_only_where_one_is_pushed(run: Run) -> None:
    run.mapping["tuner"] = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
    vllm = run.mapping["rollout_matching"]["vllm"]
    vllm |= {"enable_lora": True, "sync": {"mode": "auto"}}
    run.mapping["rollout_matching"]["decode_batch_size"] = 12
    ended, base_url = against(run, info(max_num_seqs=11))
    told = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    lacks = f"error: GET {base_url}/info/ enable_lora"
    assert (ended.code, told[-1]) == (2, lacks)
    assert "auto resolves to adapter" in ended.stderr
    for answer, mode in (
        (info(max_num_seqs=11, enable_lora=True), "auto"),
        (info(max_num_seqs=11), "full"),
    ):
        vllm["sync"] = {"mode": mode}
        ended, _ = against(run, answer)
        assert ended.code == 2
        assert "enable_lora" not in ended.stderr


@pytest.mark.req("REP-06")
def test_every_server_with_other_settings_is_told_at_once(run: Run) -> None:
    with scripted_server() as first, scripted_server() as second, scripted_server() as same:
        first.routes["GET /info/"] = lambda _: info(GUARD)
        second.routes["GET /info/"] = lambda _: info(OTHER_GUARD, max_num_seqs=1)
        with_server(run, first.base_url, timeout_s=20.0)
        run.mapping["rollout_matching"]["vllm"]["server"]["servers"] = [
            {"base_url": server.base_url, "group_port": 51216 + i}
            for i, server in enumerate([first, second, same])
        ]
        ended = run.train()
    assert ended.code == 2
    told = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert told == [
        f"error: GET {first.base_url}/info/ repeat_terminate",
        f"error: GET {second.base_url}/info/ repeat_terminate",
        f"error: GET {second.base_url}/info/ max_num_seqs",
    ]


@pytest.mark.req("SRV-06")
def test_a_server_that_wants_a_token_is_told_before_the_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLOUT_SERVER_TOKEN", raising=False)
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: problem("unauthorized", "no token", "header")
        with_server(run, server.base_url, timeout_s=20.0)
        ended = run.train()
    assert ended.code == 2
    assert "ROLLOUT_SERVER_TOKEN" in ended.parts[2]
    assert not ended.heavy & {"torch", "transformers"}


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:port"])
def test_an_address_with_an_impossible_port_is_refused(run: Run, url: str) -> None:
    with_server(run, url, timeout_s=0.5)
    ended = run.train()
    assert ended.code == 2
    assert ended.parts[0] == "rollout_matching.vllm.server.servers[0].base_url"
    assert ended.heavy == set()


def test_a_demo_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    ended = command("learner.cli", "demo", "--out", str(tmp_path))
    assert (ended.code, ended.parts[0]) == (2, str(tmp_path))
    assert ended.heavy == set()


@pytest.mark.req("ARCH-01")
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("learner.cli", []),
        ("learner.cli", ["train"]),
        ("learner.cli", ["demo"]),
        ("learner.cli", ["toy", "make-data"]),
        ("rollout_server.cli", []),
        ("rollout_server.cli", ["serve"]),
    ],
)
def test_help_loads_nothing_heavy(module: str, arguments: list[str]) -> None:
    ended = command(module, *arguments, "--help")
    assert ended.code == 0, ended.stderr
    assert ended.heavy == set()


@pytest.mark.parametrize("script", ["learner", "rollout-server"])
def test_help_is_there_at_once(script: str) -> None:
    """In processor time: other programs share the machine."""
    path = Path(sys.executable).parent / script
    before = processor_seconds_of_children()
    done = subprocess.run([path, "--help"], capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    assert processor_seconds_of_children() - before <= HELP_SECONDS


def processor_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.req("CFG-01")
def test_training_takes_a_file_and_no_hyperparameters() -> None:
    assert list(inspect.signature(learner.commands.run.train).parameters) == ["file", "config"]
    ended = command("learner.cli", "train", "--config", "x.yaml", "--learning-rate", "1")
    assert ended.code == 2
    assert "No such option" in ended.stderr
