"""A run in this process that records the answers of its server after every push."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from learner.config import Config
from learner.models.load import LoadedModel, load_model
from learner.rollout.backend import RolloutBackend
from learner.rollout.client import RolloutClient
from learner.rollout.policy import Policy, asking_of
from learner.rollout.sync.probe import Probe, ProbeResult
from learner.training.backends import open_backend
from learner.training.run_log import CallLog, ProgressDisplay
from learner.training.start_checks import reach_servers, read_inputs
from learner.training.train import RunParts, build_runner, build_scorer, build_trainer
from learner.training.trainer import build_optimizer
from learner.types import RolloutOutput
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.contract.running_server import RunningServer, image_request, response_ids, text_request


@dataclass
class Recorder:
    """A backend that saves the checkpoint and records the server's answers after every push.

    said: greedy answers, by checkpoint. probed: answers against the model in training.
    """

    backend: RolloutBackend
    loaded: LoadedModel
    server: RunningServer
    folder: Path
    said: dict[Path, list[list[int]]] = field(default_factory=dict)
    probed: list[ProbeResult] = field(default_factory=list)

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        return self.backend.rollout(requests, request_config)

    def push_weights(self, version: int) -> None:
        self.backend.push_weights(version)
        checkpoint = self.folder / f"pushed-{version}"
        assert isinstance(self.loaded.model, PreTrainedModel)
        self.loaded.model.save_pretrained(checkpoint)
        self.loaded.processor.save_pretrained(checkpoint)
        self.said[checkpoint] = greedy_answers(self.server, self.server.media / "toy")
        with RolloutClient(self.server.process.base_url, timeout_s=60.0) as client:
            self.probed += Probe(self.loaded, "float32").ask(client.infer, version)

    def close(self) -> None:
        self.backend.close()


def greedy_answers(server: RunningServer, toy: Path) -> list[list[int]]:
    """Greedy ids of two text and two image prompts."""
    requests = [text_request("Detect every object in the image."), text_request("red")]
    requests += [image_request(str(toy / "images" / "val" / f"0000{i}.png")) for i in (0, 1)]
    return [response_ids(envelope) for envelope in server.infer(requests, max_tokens=48)]


def run_recorded(server: RunningServer, config: Config) -> Recorder:
    """Train in this process with a recording backend."""
    folder = Path(config.training.output_dir)
    folder.mkdir()
    loaded, inputs = load_model(config), read_inputs(config)
    opened = open_backend(config, loaded, reach_servers(config), folder, inputs.train)
    recorder = Recorder(opened.backend, loaded, server, folder)
    policy = Policy(replace(opened, backend=recorder), asking_of(config))
    optimizer = build_optimizer(loaded.model, config.training, loaded.family)
    display = ProgressDisplay(Console(quiet=True), config.training.run_name)
    parts = RunParts(config, inputs, loaded, optimizer, policy, CallLog(folder))
    build_trainer(parts, build_runner(parts), build_scorer(parts), display).train()
    policy.close()
    return recorder
