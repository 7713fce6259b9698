"""One config and the same samples through all three backends (ARCH-03).

The learner's weights differ from those of the checkpoint that the servers start with. A server
that missed the push answers differently.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, load_mapping, merge, parse_config
from learner.models.load import load_model
from learner.rollout.policy import Policy, request_settings
from learner.rollout.server_process import ServerProcess, free_ports
from learner.training.backends import open_backend
from learner.training.input_checks import check_backend, read_inputs
from learner.training.server_checks import reach_servers
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.contract.running_server import CPU, START_TIMEOUT_S, draw_scene
from tests.contract.toy_checkpoints import set_weights

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WARMUP = load_mapping(ROOT / "configs" / "demo" / "warmup.yaml")
GUARD = RepeatTerminateConfig(
    enabled=True, min_new_tokens=2, max_consecutive_token_repeats=3, ngram_size=2, ngram_repeats=2
)
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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    lines = []
    for number in range(SCENES):
        image = draw_scene(folder / f"{number}.png", number)
        box = {"desc": "square", "bbox_2d": [100, 100, 500, 500]}
        lines.append({"images": [image.name], "width": 64, "height": 64, "objects": [box]})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def mapping_of(model: Path, data: Path, out: Path, backend: dict[str, Any]) -> dict[str, Any]:
    """The one config. out, backend: what differs."""
    bare = {key: section for key, section in WARMUP.items() if key != "rollout_matching"}
    return merge(
        bare,
        {
            "model": {"model": str(model)},
            "data": {"train_jsonl": str(data), "val_jsonl": None},
            "training": {"output_dir": str(out)},
            "rollout_matching": merge(ROLLOUT, backend),
        },
    )


def answers(mapping: dict[str, Any], weights: Path) -> Answers:
    """Greedy answers of all samples, one of them without its image, with pushed `weights`."""
    config = parse_config(mapping)
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


def answers_of_a_server(model: Path, data: Path, folder: Path, weights: Path) -> Answers:
    """By a server that was started with the YAML of the run."""
    port, group_port = free_ports(2)
    address = {"base_url": f"http://127.0.0.1:{port}", "group_port": group_port}
    server = {"vllm": {"mode": "server", "server": {"servers": [address]}}}
    mapping = mapping_of(model, data, folder / "server", server)
    run, log = folder / "server.yaml", folder / "server.log"
    run.write_text(dump_mapping(mapping))
    options = ["--model", str(model), *CPU, "--allowed-media-dir", str(data.parent)]
    with ServerProcess([*options, "--run-config", str(run)], log, port) as process:
        process.wait_until_healthy(START_TIMEOUT_S)
        return answers(mapping, weights)


@pytest.mark.req(
    "ARCH-03", "ROLL-01", "ROLL-03", "SYNC-07", "REP-03", "SEED-02", "CFG-09", "CHB-01"
)
@pytest.mark.scenario("Backend implementation swap preserves rollout contract")
def test_all_backends_answer_alike(
    tied: Path, other_tied: Path, data: Path, tmp_path: Path
) -> None:
    """With the guard and at the end of the context. All fields, in float32."""
    hf = mapping_of(tied, data, tmp_path / "hf", {"rollout_backend": "hf"})
    by_hf = answers(hf, other_tied)
    assert {output["repeat_terminated"] for output in by_hf} == {True, False}
    reached = {len(o["prompt_token_ids"]) + len(o["response_token_ids"]) for o in by_hf}
    assert max(reached) == MAX_MODEL_LEN
    assert len({tuple(output["response_token_ids"]) for output in by_hf}) > SCENES // 2
    assert [output["seed"] for output in by_hf] == [7 + i for i in range(SCENES + 1)]
    assert {version for output in by_hf for version in output["weights_version"]} == {1}

    assert answers_of_a_server(tied, data, tmp_path, other_tied) == by_hf

    assert answers(mapping_of(tied, data, tmp_path / "run", {}), other_tied) == by_hf
