"""Which channel several learner processes run (seed 001); threads are the processes."""

from pathlib import Path

import pytest

from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.distributed.peers import Peers
from learner.rollout.policy import Asking, OpenBackend, Policy
from learner.training.step import PlainEngine, StepRunner
from shared_contracts.infer import RequestConfig
from tests.unit.ranks_in_threads import in_ranks
from tests.unit.small_run import small_config
from tests.unit.test_step import Parts, Scripted

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.req("STEP-01", "DDP-01", "RES-14")
def test_multi_process_learner_uses_rank0_broadcast_for_step_kind(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    """Even where another rank's own schedule has no channel B, it runs what rank 0 says."""
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)[:4]
    configs = [
        small_config(toy_checkpoint, toy_data, tmp_path, stage2_ab={"schedule": {"b_ratio": ratio}})
        for ratio in (0.5, 0.0)
    ]

    loaded = [Parts(config) for config in configs]

    def kinds(peers: Peers) -> list[str]:
        config, parts = configs[peers.rank], loaded[peers.rank]
        own = samples[peers.rank :: 2]
        policy = Policy(OpenBackend(Scripted(own, parts)), Asking("", None, RequestConfig()))
        runner = StepRunner(config, parts.recipe(config), policy, peers=peers)
        model = parts.loaded.model
        return [runner.run(model, own, step, PlainEngine())[1].channel for step in range(4)]

    assert [rank.result() for rank in in_ranks(2, kinds)] == [["A", "B", "A", "B"]] * 2
