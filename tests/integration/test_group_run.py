"""A run of `stage2_group_relative` on real parts: vLLM's samples and log-probabilities, pushes."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from learner.cli import app
from learner.config import load_mapping, merge, parse_config
from learner.data.toy import make_data
from learner.runs.run_folder import RunFolder
from learner.training.input_checks import check_inputs
from learner.training.server_checks import reach_servers
from learner.training.train import train
from tests.contract.running_server import RunningServer
from tests.integration.shared_server import address_of, give_back
from tests.unit.grouped import GROUPED, POLICY_GRADIENT
from tests.unit.small_run import WARMUP, metric_lines

pytestmark = [pytest.mark.timeout(600), pytest.mark.req("GROUP-01", "GROUP-03", "GROUP-04")]

SAMPLES, SIZE, STEPS = 2, 4, 2


def test_a_run_learns_from_groups_of_sampled_answers_and_is_replayed(
    server: RunningServer, tied: Path, toy_checkpoint: Path, tmp_path: Path
) -> None:
    drawn = make_data(server.media / "groups", train=SAMPLES * STEPS, val=1, seed=0)
    module = POLICY_GRADIENT | {"config": POLICY_GRADIENT["config"] | {"kl_weight": 0.1}}
    own: dict[str, Any] = {
        "model": {"model": str(toy_checkpoint)},
        "data": {"train_jsonl": str(drawn.train_jsonl), "val_jsonl": None},
        "training": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": STEPS,
            "save_strategy": "no",
            "effective_batch_size": SAMPLES,
            "learning_rate": 1e-3,
        },
        "stage2_ab": {"pipeline": {"objective": [module]}},
        "group_relative": {"group_size": SIZE},
        "rollout_matching": {
            "max_new_tokens": 24,
            "max_logprob_mismatch": 1e-3,
            "repeat_terminate": {"enabled": False},
            "vllm": {"server": {"servers": [address_of(server.process.base_url)]}},
        },
    }
    config = parse_config(merge(merge(load_mapping(WARMUP), GROUPED), own))
    try:
        folder = train(config, check_inputs(config), reach_servers(config), Console(quiet=True))
    finally:
        give_back(server, tied)
    steps = metric_lines(folder, "step/channel_b")
    assert [line["step/channel_b"] for line in steps] == [1.0] * STEPS
    for number, line in enumerate(steps, start=1):
        answers = RunFolder.open(folder).answers(number)
        assert len(answers) == line["packing/post_rollout_segments"] == SAMPLES * SIZE
        seeds = [answer.seed for answer in answers]
        assert seeds == list(range(seeds[0] or 0, (seeds[0] or 0) + len(seeds)))
        assert len({tuple(answer.response_token_ids) for answer in answers}) > SAMPLES
        assert line["policy_gradient/ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert line["policy_gradient/clip_fraction"] == 0
        assert line["mismatch/tokens"] == sum(len(answer.logprobs or []) for answer in answers)
        assert line["stage2_ab/channel_b/fn_appended"] == 0
    first, second = (line["policy_gradient/kl"] for line in steps)
    assert first == pytest.approx(0, abs=1e-7)
    assert second >= first
    replayed = CliRunner().invoke(app, ["replay", str(folder)])
    assert replayed.exit_code == 0, replayed.output
