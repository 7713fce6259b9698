"""The learner's own push into a real server: verified, seen through by a probe, and healed."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration
from typer.testing import CliRunner, Result

from learner.cli import app
from learner.config import dump_mapping
from learner.data.toy import ToyData
from learner.models.load import LoadedModel
from learner.rollout.client import RolloutClient
from learner.rollout.server_process import free_ports
from learner.rollout.sync.probe import Probe, ProbeResult, probe_call
from learner.rollout.sync.push import Join, WeightPusher, WeightSyncError
from learner.rollout.sync.transports import WeightGroup, join_group
from learner.rollout.sync.weights import MergedWeights, OneSource
from shared_contracts.digests import sample
from shared_contracts.errors import ProblemError
from shared_contracts.rollout_config import Verify
from shared_contracts.weights import ParameterMeta, SyncReport
from tests.contract.running_server import CPU, START_TIMEOUT_S, RunningServer
from tests.unit.loaded_models import loaded_from
from tests.unit.small_run import small_mapping

BUCKET_BYTES = 2**20
Stream = Iterable[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def learner(tied: Path) -> LoadedModel:
    """The weights the shared server has when a test begins and ends."""
    return loaded_from(tied)


@pytest.fixture(scope="module")
def changed(other_tied: Path) -> LoadedModel:
    """The learner after an update of every weight."""
    return loaded_from(other_tied)


class Pushing:
    """A client of the shared server, and a port for its weight group."""

    def __init__(self, server: RunningServer) -> None:
        self.client = RolloutClient(server.process.base_url, timeout_s=60.0)
        (self._port,) = free_ports(1)

    @contextmanager
    def pusher(
        self, loaded: LoadedModel, verify: Verify = "full", join: Join = join_group
    ) -> Iterator[WeightPusher]:
        choice = OneSource(MergedWeights(loaded.model))
        pusher = WeightPusher(
            self.client, self._port, choice, "gloo", BUCKET_BYTES, verify, join=join
        )
        yield pusher
        pusher.close()

    def push(self, loaded: LoadedModel, verify: Verify = "full") -> SyncReport:
        with self.pusher(loaded, verify) as pusher:
            return pusher.push(self.next_version())

    def next_version(self) -> int:
        return self.client.info().weights_version + 1

    def probe(self, loaded: LoadedModel) -> list[ProbeResult]:
        """Of the newest version."""
        return Probe(loaded, "float32").ask(self.client.infer, self.next_version() - 1)


@pytest.fixture
def pushing(server: RunningServer, learner: LoadedModel) -> Iterator[Pushing]:
    """Ends with the weights the server began with."""
    pushing = Pushing(server)
    yield pushing
    pushing.push(learner)
    pushing.client.close()


def differing(results: list[ProbeResult]) -> set[str]:
    return {result.prompt for result in results if result.difference is not None}


# --- pushes that are what they say


@pytest.mark.req("SYNC-02", "SYNC-05", "SYNC-06", "SYNC-10")
def test_a_push_is_verified_in_full_and_answers_are_the_learners_own(
    pushing: Pushing, changed: LoadedModel
) -> None:
    """The prompts are asked before, so that anything stale would show."""
    pushing.client.infer(probe_call())
    version = pushing.next_version()
    report = pushing.push(changed)
    parameters = dict(changed.model.named_parameters())
    assert report.status.weights_version == version
    assert report.verified == len(parameters)
    assert report.bytes == sum(p.nbytes for p in parameters.values())
    assert {"pause", "transfer", "load", "verify", "caches", "send", "total"} <= set(report.seconds)
    results = pushing.probe(changed)
    assert differing(results) == set()
    assert all(result.compared > 1 for result in results)
    assert changed.model.training, "the probe leaves the model as it was"


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize("verify", ["off", "sample"])
def test_fewer_parameters_are_compared_where_fewer_are_asked_for(
    pushing: Pushing, changed: LoadedModel, verify: Verify
) -> None:
    version = pushing.next_version()
    sampled = sample(MergedWeights(changed.model).metadata("float32"), version)
    report = pushing.push(changed, verify)
    assert report.verified == (len(sampled) if verify == "sample" else 0)
    assert 0 < len(sampled) < len(list(changed.model.parameters()))


@pytest.mark.req("SYNC-06", "SYNC-09")
def test_a_probe_sees_a_version_that_came_without_new_weights(
    pushing: Pushing, learner: LoadedModel, changed: LoadedModel
) -> None:
    """Every digest agrees: what was sent is held, but it is not what the learner has."""
    pushing.push(learner)
    assert differing(pushing.probe(learner)) == set()
    assert differing(pushing.probe(changed)) == {"text", "image"}


@pytest.mark.req("WIRE-03")
def test_a_probe_is_answered_by_the_version_it_is_about(
    pushing: Pushing, learner: LoadedModel
) -> None:
    with pytest.raises(ProblemError, match="other weights"):
        Probe(learner, "float32").ask(pushing.client.infer, pushing.next_version())


# --- pushes that went wrong on the way


class Corrupting:
    """A weight group that sends something else than was digested."""

    def __init__(self, group: WeightGroup, corrupt: Callable[[Stream], Stream]) -> None:
        self._group = group
        self._corrupt = corrupt
        self.close = group.close
        self.abandon = group.abandon

    def send(self, parameters: Sequence[ParameterMeta], weights: Stream) -> None:
        self._group.send(parameters, self._corrupt(weights))


def corrupting(corrupt: Callable[[Stream], Stream]) -> Join:
    return lambda body, given_up: Corrupting(join_group(body, given_up), corrupt)


def stale(name: str, old: Tensor, weights: Stream) -> Stream:
    """One parameter goes out as it was before the update."""
    for each, weight in weights:
        yield each, old if each == name else weight


def swapped(first: str, second: str, weights: Stream) -> Stream:
    """Two parameters of one shape travel in each other's place."""
    everything = dict(weights)
    trade = {first: second, second: first}
    for name in list(everything):
        yield name, everything[trade.get(name, name)]


def nudged(name: str, row: int, column: int, weights: Stream) -> Stream:
    """One element is the next larger float."""
    for each, weight in weights:
        if each == name:
            weight = weight.clone()
            up = torch.tensor(torch.inf)
            weight[row, column] = torch.nextafter(weight[row, column], up)
        yield each, weight


LAYER = "model.language_model.layers"
Q_PROJ = f"{LAYER}.1.self_attn.q_proj.weight"
K_PROJ = f"{LAYER}.1.self_attn.k_proj.weight"
PATCHES = "model.visual.patch_embed.proj.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"


def corruptions(learner: LoadedModel) -> dict[str, tuple[Callable[[Stream], Stream], set[str]]]:
    """What happens on the way, and the parameters that are then not as they were sent."""
    old = {name: p.detach() for name, p in learner.model.named_parameters()}
    return {
        "a stale part of a fused layer": (partial(stale, K_PROJ, old[K_PROJ]), {K_PROJ}),
        "a stale vision weight": (partial(stale, PATCHES, old[PATCHES]), {PATCHES}),
        "a stale embedding, tied to the head": (
            partial(stale, EMBEDDING, old[EMBEDDING]),
            {EMBEDDING},
        ),
        "two tensors that traded places": (partial(swapped, Q_PROJ, K_PROJ), {Q_PROJ, K_PROJ}),
        "one element a little off": (partial(nudged, Q_PROJ, 5, 7), {Q_PROJ}),
    }


@pytest.mark.req("SYNC-05", "SYNC-06")
def test_what_differs_from_what_was_digested_poisons_and_is_named_and_a_full_push_heals(
    pushing: Pushing, learner: LoadedModel, changed: LoadedModel
) -> None:
    for what, (corrupt, wrong) in corruptions(learner).items():
        with pushing.pusher(changed, join=corrupting(corrupt)) as pusher:
            with pytest.raises(WeightSyncError) as caught:
                pusher.push(pushing.next_version())
            assert (caught.value.side, caught.value.phase) == ("server", "verify"), what
            assert set(caught.value.parameters) == wrong, what
            assert all(name in str(caught.value) for name in wrong), what
            with pytest.raises(ProblemError, match="full push") as refused:
                pushing.client.infer(probe_call())
            assert refused.value.problem.kind == "weights-poisoned", what
        assert pushing.push(changed).verified == len(list(changed.model.parameters()))
    assert differing(pushing.probe(changed)) == set()


@pytest.mark.req("SYNC-06")
def test_a_sample_sees_what_it_looks_at(
    pushing: Pushing, learner: LoadedModel, changed: LoadedModel
) -> None:
    """Every projection is some layer's turn: in this version that one is wrong."""
    version = pushing.next_version()
    chosen = sample(MergedWeights(changed.model).metadata("float32"), version)
    name = next(name for name in chosen if name.endswith("k_proj.weight"))
    old = dict(learner.model.named_parameters())[name].detach()
    with (
        pushing.pusher(changed, "sample", corrupting(partial(stale, name, old))) as pusher,
        pytest.raises(WeightSyncError) as caught,
    ):
        pusher.push(version)
    assert caught.value.parameters == (name,)


@pytest.mark.req("SYNC-05")
def test_a_manifest_that_leaves_a_parameter_out_changes_nothing(
    pushing: Pushing, learner: LoadedModel, changed: LoadedModel
) -> None:
    class Incomplete(MergedWeights):
        def metadata(self, dtype: Any) -> list[ParameterMeta]:
            return [p for p in super().metadata(dtype) if p.name != PATCHES]

    pushing.push(learner)
    (port,) = free_ports(1)
    choice = OneSource(Incomplete(changed.model))
    pusher = WeightPusher(pushing.client, port, choice, "gloo", BUCKET_BYTES, "full")
    with pytest.raises(WeightSyncError) as caught:
        pusher.push(pushing.next_version())
    assert (caught.value.side, caught.value.phase) == ("server", "start")
    (missing,) = caught.value.parameters  # in the words of the engine, which misses it
    assert PATCHES.endswith(missing)
    assert differing(pushing.probe(learner)) == set()


# --- caches of old weights


@contextmanager
def forgetful_server(checkpoint: Path, folder: Path) -> Iterator[str]:
    """Base URL of a healthy server whose engines keep what old weights cached."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tests.contract.forgetful_server", "serve"]
    options = ["--model", str(checkpoint), "--max-model-len", "512", "--port", str(port), *CPU]
    with (folder / "forgetful.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *options, "--parent-pid", str(os.getpid())], stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        with RolloutClient(url, START_TIMEOUT_S) as client:
            client.wait_until_pushable()
        yield url
    finally:
        process.terminate()
        process.wait(60)


def with_other_vision(checkpoint: Path, out: Path) -> Path:
    """The checkpoint with new weights in the vision tower alone."""
    loaded = loaded_from(checkpoint)
    generator = torch.Generator().manual_seed(3)
    for name, weight in loaded.model.named_parameters():
        if ".visual." in name and weight.ndim >= 2:
            weight.data.normal_(0.0, 0.12, generator=generator)
    assert isinstance(loaded.model, Qwen3VLForConditionalGeneration)
    loaded.model.save_pretrained(out)
    loaded.processor.save_pretrained(out)
    return out


def probe_command(checkpoint: Path, url: str, folder: Path) -> Result:
    """`learner probe` of a config with one server."""
    address = {"base_url": url, "group_port": free_ports(1)[0]}
    mapping = small_mapping(
        checkpoint,
        ToyData.under(folder),
        folder / "run",
        rollout_matching={"vllm": {"mode": "server", "server": {"servers": [address]}}},
    )
    config = folder / "probe.yaml"
    config.write_text(dump_mapping(mapping))
    return CliRunner().invoke(app, ["probe", "--config", str(config)], env={"COLUMNS": "200"})


@pytest.mark.req("SYNC-06")
def test_the_probe_command_finds_the_shared_server_as_the_learner(
    server: RunningServer, tied: Path, tmp_path: Path
) -> None:
    result = probe_command(tied, server.process.base_url, tmp_path)
    assert result.exit_code == 0, result.output
    assert result.output.count("as the learner") == 2


@pytest.mark.req("SYNC-05", "SYNC-06")
def test_a_probe_catches_caches_of_old_vision_weights_that_digests_cannot(
    tied: Path, tmp_path: Path
) -> None:
    """The push itself is verified in full; only what was cached of the image is old."""
    checkpoint = with_other_vision(tied, tmp_path / "other_vision")
    with forgetful_server(tied, tmp_path) as url:
        result = probe_command(checkpoint, url, tmp_path)
    assert result.exit_code == 1, result.output
    (text,) = [line for line in result.output.splitlines() if "text" in line]
    (image,) = [line for line in result.output.splitlines() if "image" in line]
    assert "as the learner" in text
    assert "the server says" in image
