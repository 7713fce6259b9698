"""One config and the same samples through all three backends (ARCH-03).

The learner's weights differ from those of the checkpoint that the servers start with. A server
that missed the push answers differently.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, merge
from learner.config.schema import Config
from learner.data.toy import ToyData, make_data
from learner.models.load import load_model
from learner.rollout.policy import Policy, request_settings
from learner.rollout.server_process import ServerProcess, free_ports
from learner.training.backends import open_backend
from learner.training.input_checks import check_backend, read_inputs
from learner.training.server_checks import reach_servers
from tests.contract.running_server import CPU, START_TIMEOUT_S
from tests.contract.toy_checkpoints import set_weights
from tests.integration.test_colocated_run import GUARD
from tests.unit.small_run import small_config

pytestmark = pytest.mark.slow

SCENES = 9
# A prompt with an image has 33 tokens: its answer ends at the context or by the guard.
MAX_MODEL_LEN = 60
ROLLOUT = {
    "decode_batch_size": 4,
    "max_new_tokens": 40,
    "repeat_terminate": GUARD.model_dump(),
    "vllm": {"max_model_len": MAX_MODEL_LEN},
}

Answers = list[dict[str, Any]]


def config_of(model: Path, data: ToyData, out: Path, **backend: Any) -> Config:
    """The config of all backends; they differ in `out` and `backend`."""
    return small_config(model, data, out, rollout_matching=merge(ROLLOUT, backend))


def answers(config: Config, weights: Path) -> Answers:
    """Greedy answers of all samples, one of them without its image, with pushed `weights`."""
    placement, scenes = check_backend(config, {}), read_inputs(config).train
    samples = [*scenes, replace(scenes[0], images=())]
    loaded, folder = load_model(config), Path(config.training.output_dir)
    set_weights(loaded.model, weights)
    folder.mkdir()
    backend = open_backend(config, loaded, reach_servers(config), folder, samples, placement)
    policy = Policy(backend, request_settings(config))
    try:
        policy.push_if_stale()
        return [asdict(output) for output in policy.answer(samples, seed=7)]
    finally:
        policy.close()


def answers_of_a_server(model: Path, data: ToyData, folder: Path, weights: Path) -> Answers:
    """Answers of a server that was started with the YAML of the run."""
    port, group_port = free_ports(2)
    address = {"base_url": f"http://127.0.0.1:{port}", "group_port": group_port}
    config = config_of(model, data, folder / "server", vllm={"server": {"servers": [address]}})
    run, log = folder / "server.yaml", folder / "server.log"
    run.write_text(dump_mapping(config.model_dump(mode="json")))
    options = ["--model", str(model), *CPU, "--allowed-media-dir", str(data.train_jsonl.parent)]
    with ServerProcess([*options, "--run-config", str(run)], log, port) as process:
        process.wait_until_healthy(START_TIMEOUT_S)
        return answers(config, weights)


@pytest.mark.req(
    "ARCH-03", "ROLL-01", "ROLL-03", "SYNC-07", "REP-03", "SEED-02", "CFG-09", "CHB-01"
)
@pytest.mark.scenario("Backend implementation swap preserves rollout contract")
def test_all_backends_answer_alike(tied: Path, other_tied: Path, tmp_path: Path) -> None:
    """Compare all fields, in float32; the guard and the end of the context cut answers."""
    data = make_data(tmp_path / "data", train=SCENES, val=1, seed=0)
    hf = config_of(tied, data, tmp_path / "hf", rollout_backend="hf")
    by_hf = answers(hf, other_tied)
    assert {output["repeat_terminated"] for output in by_hf} == {True, False}
    reached = {len(o["prompt_token_ids"]) + len(o["response_token_ids"]) for o in by_hf}
    assert max(reached) == MAX_MODEL_LEN
    assert len({tuple(output["response_token_ids"]) for output in by_hf}) > SCENES // 2
    assert [output["seed"] for output in by_hf] == [7 + i for i in range(SCENES + 1)]
    assert {version for output in by_hf for version in output["weights_version"]} == {1}

    assert answers_of_a_server(tied, data, tmp_path, other_tied) == by_hf

    vllm = {"mode": "colocate", "server": None}
    colocated = config_of(tied, data, tmp_path / "run", vllm=vllm)
    assert answers(colocated, other_tied) == by_hf
