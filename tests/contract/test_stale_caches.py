"""The proof of effect sees an engine that answers from what its old weights cached (SYNC-06)."""

from pathlib import Path

import pytest

from learner.data.toy import ToyData
from learner.rollout.client import RolloutClient
from learner.rollout.server_process import free_ports
from learner.rollout.sync.probe import ProofOfEffect, WeightsDiffer, probe_call
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import MergedWeights, SyncMode
from tests.contract.running_server import running_server
from tests.unit.loaded_models import load_small

STALE_ENGINE = """
from rollout_server.engines import vllm

def build(settings, index):
    from rollout_server.engines.vllm.engine import VllmEngine

    class StaleEngine(VllmEngine):
        async def pause(self):
            await self._llm.pause_generation(mode="wait", clear_cache=False)

        async def finish_weight_update(self, version):
            await self._llm.finish_weight_update()
            await self._llm.update_weight_version(str(version))
            self.weights_version = version

    return StaleEngine.build(settings, index)

vllm.build = build
"""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.req("SYNC-06")
def test_the_proof_of_effect_sees_caches_of_the_old_weights(
    tied: Path,
    other_tied: Path,
    toy_data: ToyData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STALE_ENGINE)  # Python imports it when it starts
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    learner = load_small(other_tied, toy_data, tmp_path / "run")
    with (
        running_server(tied, tmp_path / "server") as server,
        RolloutClient(server.process.base_url, timeout_s=60.0) as client,
    ):
        client.infer(probe_call())  # caches the prompts
        source = SyncMode(MergedWeights(learner.model), None, fallback_to_full=False)
        pusher = WeightPusher(client, free_ports(1)[0], source, "gloo", 2**18)
        pusher.push(1)
        pusher.close()
        with pytest.raises(WeightsDiffer, match="does not compute with the weights"):
            ProofOfEffect(learner, "full").check("here", client.infer(probe_call(1)), "float32")
