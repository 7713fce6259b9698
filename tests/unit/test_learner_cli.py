"""The learner's command line on bad input, and what imports what.

Errors have three parts and exit code 2. Heavy packages are loaded late.
"""

import inspect
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import learner.commands.run
import learner.training.input_checks
from learner.config import Config, dump_mapping
from learner.data.toy import ToyData
from learner.rollout.server_process import free_ports
from learner.training.input_checks import RunInputs
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.server_info import Info
from tests.unit.config_faults import changed
from tests.unit.scripted_server import info, scripted_server
from tests.unit.small_run import small_mapping

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "transformers", "fastapi", "numpy", "peft")
SERVER = "rollout_matching.vllm.server"


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, its errors, and what it had imported."""

    code: int
    stderr: str
    heavy: set[str]


def command(module: str, *arguments: str) -> Ended:
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
    """A config file in a folder of its own, and the errors of `learner train`."""

    def __init__(self, mapping: dict[str, Any], folder: Path) -> None:
        self.mapping = mapping
        self.folder = folder
        self.output = Path(mapping["training"]["output_dir"])

    def set(self, **values: Any) -> None:
        """Set dotted keys; `__` stands for a dot."""
        for key, value in values.items():
            self.mapping = changed(key.replace("__", "."), value, self.mapping)

    def use_servers(self, *base_urls: str, timeout_s: float = 60.0) -> None:
        ports = free_ports(len(base_urls))
        servers = [{"base_url": u, "group_port": p} for u, p in zip(base_urls, ports, strict=True)]
        self.mapping = changed(SERVER, {"servers": servers, "timeout_s": timeout_s}, self.mapping)
        self.set(stage2_ab__schedule__b_ratio=0.5)

    @property
    def file(self) -> Path:
        path = self.folder / "run.yaml"
        path.write_text(dump_mapping(self.mapping))
        return path

    def errors(self) -> list[ContractError]:
        with pytest.raises(ContractError) as caught:
            learner.commands.run.train(self.file)
        assert not self.output.exists()
        return caught.value.errors

    def error(self) -> ContractError:
        (error,) = self.errors()
        return error

    def train(self) -> Ended:
        ended = command("learner.cli", "train", "--config", str(self.file))
        assert not self.output.exists()
        return ended


@pytest.fixture
def run(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Run:
    return Run(small_mapping(toy_checkpoint, toy_data, tmp_path / "out"), tmp_path)


# --- Programs ---------------------------------------------------------------------------


@pytest.mark.req("CFG-02")
def test_bad_keys_end_training_with_all_errors_before_anything_heavy_is_loaded(run: Run) -> None:
    run.set(training__learning_rat=1, rollout_matching__vllm__server__servers__0__unknown_flag=1)
    ended = run.train()
    assert ended.code == 2
    assert "error: training.learning_rat\n  found: unknown key (" in ended.stderr
    assert "'learning_rate'" in ended.stderr
    assert f"error: {SERVER}.servers[0].unknown_flag\n" in ended.stderr
    assert ended.heavy == set()


@pytest.mark.req("CFG-05", "SYNC-04")
def test_a_missing_server_ends_training_before_torch_is_loaded(run: Run) -> None:
    with socket.socket() as taken:  # no other program can listen there
        taken.bind(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        run.use_servers(base_url, timeout_s=0.5)
        ended = run.train()
    assert ended.code == 2
    where, found, do = ended.stderr.splitlines()
    assert where == f"error: GET {base_url}/health/"
    assert "Connection refused" in found
    assert "rollout-server serve" in do
    assert not ended.heavy & {"torch", "transformers"}


@pytest.mark.req("ARCH-01", "CFG-09", "CFG-10")
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("learner.cli", ["train", "--help"]),
        ("learner.cli", ["config", "schema"]),
        ("learner.cli", ["config", "show", "configs/demo/warmup.yaml"]),
        ("learner.cli", ["config", "check", "--keys-only", "configs/demo/warmup.yaml"]),
        ("learner.cli", ["preflight", "--config", "configs/demo/warmup.yaml"]),
        ("rollout_server.cli", ["serve", "--help"]),
    ],
)
def test_help_and_commands_about_a_config_load_nothing_heavy(module: str, words: list[str]) -> None:
    ended = command(module, *words)
    assert (ended.code, ended.stderr, ended.heavy) == (0, "", set())


@pytest.mark.req("CFG-01")
def test_training_takes_a_file_and_no_hyperparameters() -> None:
    assert list(inspect.signature(learner.commands.run.train).parameters) == ["file", "config"]


# --- Data and model ---------------------------------------------------------------------


def without_tokens(checkpoint: Path, folder: Path, *tokens: str) -> Path:
    """A copy of the tokenizer in which these added tokens are ordinary words."""
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] not in tokens]
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {k: v for k, v in vocab.items() if k not in tokens}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_model_without_its_special_tokens_is_refused(run: Run, toy_checkpoint: Path) -> None:
    missing = [f"<|coord_{k}|>" for k in range(3, 1000)]
    run.set(model__model=str(run.folder))
    assert "config.json" in run.error().found
    without_tokens(toy_checkpoint, run.folder, *missing)
    error = run.error()
    assert error.where == "model.model"
    assert "lacks 997 of the 1000 coordinate tokens, first <|coord_3|>" in error.found
    assert "--expand-vocab" in error.do
    without_tokens(toy_checkpoint, run.folder, "<|im_end|>")
    error = run.error()
    assert (error.where, "<|im_end|>" in error.found) == ("model.model", True)


@pytest.mark.req("CFG-07", "PACK-01")
@pytest.mark.scenario("Carry buffer overflow fails fast with actionable guidance")
def test_a_step_larger_than_the_data_and_a_buffer_smaller_than_a_step_are_refused(run: Run) -> None:
    run.set(training__packing_buffer=3)
    error = run.error()
    assert error.where == "training.packing_buffer"
    assert error.do == "Raise it to at least 4, or lower training.effective_batch_size"
    run.set(training__packing_buffer=64, training__effective_batch_size=25)
    error = run.error()
    assert error.where == "training.effective_batch_size"
    assert "there are 24" in error.found
    run.set(training__effective_batch_size=8, training__packing=False)
    run.use_servers("http://127.0.0.1:1")
    run.set(rollout_matching__async_rollout={"enabled": True, "queue_limit": 2})
    assert run.error().where == "rollout_matching.async_rollout.queue_limit"


@pytest.mark.req("RES-04")
def test_processes_without_torchrun_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run.error().where == "WORLD_SIZE"


@pytest.mark.req("ROLL-03")
def test_learner_beside_its_server_sees_one_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose code before torch finds three GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(learner.training.input_checks, "visible_gpus", lambda *_: [3, 1, 2])
    seen: list[tuple[str, tuple[int, ...]]] = []

    def train(config: Config, inputs: RunInputs, *_: Any) -> Path:
        assert inputs.placement is not None
        seen.append((os.environ["CUDA_VISIBLE_DEVICES"], inputs.placement.gpus))
        return Path(config.training.output_dir)

    monkeypatch.setitem(sys.modules, "learner.training.train", SimpleNamespace(train=train))
    run.set(stage2_ab__schedule__b_ratio=0.5, rollout_matching__vllm={})
    learner.commands.run.train(run.file)
    assert seen == [("3", (3, 1))]


GUARD = RepeatTerminateConfig(enabled=True, min_new_tokens=8, max_object_keys=40)
OTHER_GUARD = RepeatTerminateConfig(enabled=True, min_new_tokens=8, max_object_keys=30)


def answer_always(answer: Info, _: Any) -> Info:
    return answer


def errors_against(run: Run, *answers: Info) -> list[tuple[int, str, str]]:
    """The errors of training against servers with these `/info/`: number, key, what was found."""
    with ExitStack() as stack:
        servers = [stack.enter_context(scripted_server()) for _ in answers]
        for server, answer in zip(servers, answers, strict=True):
            server.routes["GET /info/"] = partial(answer_always, answer)
        urls = [server.base_url for server in servers]
        run.use_servers(*urls)
        errors = run.errors()
    places = [error.where.removeprefix("GET ").split("/info/ ") for error in errors]
    return [(urls.index(u), key, e.found) for (u, key), e in zip(places, errors, strict=True)]


@pytest.mark.req("REP-06")
@pytest.mark.scenario("Channel-B startup fails when repeat-aware contract is enabled but inactive")
@pytest.mark.parametrize(
    ("answer", "theirs"),
    [
        (info(), "guard is off"),
        (info(GUARD, active=False), "configured but inactive"),
        (info(GUARD.model_copy(update={"answer_format": "compact"})), '"compact"'),
    ],
    ids=["without", "inactive", "other format"],
)
def test_a_server_with_another_repeat_guard_is_refused(run: Run, answer: Info, theirs: str) -> None:
    run.set(rollout_matching__repeat_terminate=GUARD.model_dump())
    ((_, key, found),) = errors_against(run, answer)
    assert (key, theirs in found) == ("repeat_terminate", True)


@pytest.mark.req("REP-06", "SRV-03", "DEP-03")
def test_every_server_with_other_settings_is_reported_at_once(run: Run) -> None:
    run.set(rollout_matching__decode_batch_size=12, rollout_matching__vllm__max_model_len=1024)
    first, second, third, fourth = errors_against(
        run, info(GUARD), info(OTHER_GUARD, max_num_seqs=12, world_size=2), info(max_model_len=1023)
    )
    assert (first[:2], '"max_object_keys":40' in first[2]) == ((0, "repeat_terminate"), True)
    assert "repeat_terminate is off" in first[2]
    assert (second[:2], '"max_object_keys":30' in second[2]) == ((1, "repeat_terminate"), True)
    assert (third[:2], "decode_batch_size 12" in third[2]) == ((1, "max_num_seqs"), True)
    assert (fourth[:2], "is 1023, and" in fourth[2]) == ((2, "max_model_len"), True)


@pytest.mark.req("SYNC-01")
@pytest.mark.parametrize(("mode", "refused"), [("auto", ["enable_lora"]), ("full", [])])
def test_adapters_are_needed_only_if_pushed(run: Run, mode: str, refused: list[str]) -> None:
    run.set(tuner={"train_type": "lora", "lora_rank": 2, "lora_alpha": 4})
    run.set(rollout_matching__vllm__enable_lora=True, rollout_matching__vllm__sync__mode=mode)
    run.set(rollout_matching__decode_batch_size=12)
    errors = errors_against(run, info(GUARD, active=False, max_num_seqs=11))
    assert [key for _, key, _ in errors] == ["max_num_seqs", *refused]


# --- Imports


ENGINES = {"torch", "vllm", "transformers", "fastapi"}

WITHOUT_TORCH = [
    "learner.config",
    "learner.types",
    "learner.rollout.distribution",
    "learner.stages.formats.coord_json",
    "learner.stages.matching",
    "learner.stages.packing",
    "learner.stages.schedule",
    "learner.stages.targets",
    "learner.stages.tokens",
    "learner.stages.transport_plan",
]


def loaded_by(modules: list[str], packages: set[str] = ENGINES) -> set[str]:
    """Return which of `packages` an import of `modules` loads in a fresh interpreter."""
    program = f"import sys, {', '.join(modules)}\nprint(*{packages!r} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return set(done.stdout.split())


@pytest.mark.req("ARCH-01")
def test_shared_contracts_loads_pydantic_alone() -> None:
    files = (ROOT / "shared_contracts").glob("*.py")
    modules = [f"shared_contracts.{path.stem}" for path in files if path.stem != "__init__"]
    assert "shared_contracts.errors" in modules
    others = {"httpx", "learner", "numpy", "pydantic", "rollout_server", "ruamel", "yaml"}
    assert loaded_by(modules, ENGINES | others) == {"pydantic"}


@pytest.mark.req("ARCH-01")
def test_the_server_loads_vllm_with_its_engines_alone() -> None:
    modules = ["rollout_server.engines.vllm", "rollout_server.http.app", "rollout_server.serve"]
    assert loaded_by(modules, {"vllm"}) == set()


@pytest.mark.req("ARCH-02")
@pytest.mark.scenario("Shared parsing contract is importable without trainer class dependency")
def test_the_stages_load_without_torch() -> None:
    assert loaded_by(WITHOUT_TORCH) == set()
