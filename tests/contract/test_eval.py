"""`learner eval` with a real server: it answers by the checkpoint that is scored."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from learner.analysis.evaluation.folder import read_answers
from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData, make_data
from learner.operate.eval_plan import plan_evaluation
from learner.operate.eval_run import run_evaluation
from learner.training.server_checks import reach_servers
from tests.contract.running_server import RunningServer
from tests.integration.shared_server import address_of, give_back
from tests.unit.small_run import small_mapping

SAMPLES, NEW_TOKENS = 3, 24


@pytest.fixture
def data(server: RunningServer) -> ToyData:
    return make_data(server.media / "eval", train=1, val=SAMPLES, seed=0)


@pytest.fixture
def served(server: RunningServer, tied: Path, data: ToyData, tmp_path: Path) -> Iterator[Config]:
    """A config that asks the shared server, which ends with the weights it began with."""
    address = address_of(server.process.base_url)
    vllm = {"mode": "server", "server": {"servers": [address], "timeout_s": 120}}
    rollout = {"decode_batch_size": 4, "max_new_tokens": NEW_TOKENS, "vllm": vllm}
    mapping = small_mapping(tied, data, tmp_path / "run", rollout_matching=rollout)
    yield parse_config(mapping)
    give_back(server, tied)


def said(config: Config, checkpoint: Path, out: Path) -> list[list[int]]:
    plan = plan_evaluation(config, checkpoint, None, out)
    run_evaluation(plan, reach_servers(plan.config), Console(file=io.StringIO()))
    return [answer.response_token_ids for answer in read_answers(out)]


@pytest.mark.slow
@pytest.mark.req("EVAL-01", "ARCH-03", "SYNC-09", "LOGP-01")
def test_the_server_answers_by_the_checkpoint_as_the_learner_itself_would(
    served: Config, tied: Path, other_tied: Path, tmp_path: Path
) -> None:
    asked = merge(served.model_dump(mode="json"), {"rollout_matching": {"logprobs": True}})
    by_server = said(parse_config(asked), other_tied, tmp_path / "server")
    for answer in read_answers(tmp_path / "server"):
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.response_token_ids)
    assert len(by_server) == SAMPLES
    mapping = merge(served.model_dump(mode="json"), {"rollout_matching": {"rollout_backend": "hf"}})
    itself = parse_config(mapping)
    assert by_server == said(itself, other_tied, tmp_path / "hf")
    assert by_server != said(itself, tied, tmp_path / "tied")
