"""What `learner doctor` makes of what servers say: token, settings, ports, weights, answers."""

import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoProcessor, PreTrainedTokenizerFast

from learner.config.schema import Config
from learner.data.jsonl import build_request, read_samples
from learner.data.toy import ToyData
from learner.models.packed_forward import encode_request
from learner.operate.doctor import servers, weights
from learner.operate.doctor.findings import Finding
from learner.rollout.answers import UNKNOWN
from learner.rollout.client import ServerUnreachable
from learner.rollout.sync.push import WeightSyncError
from shared_contracts.errors import Problem, ProblemError
from shared_contracts.rollout_config import ServerConfig
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from tests.unit.findings import by_check, worst
from tests.unit.scripted_server import envelope, scripted_server
from tests.unit.scripted_server import info as info_of
from tests.unit.small_run import small_config

URL = "http://serve-0:8000"

pytestmark = pytest.mark.req("DEP-03")


@pytest.fixture
def config(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Config:
    return small_config(toy_checkpoint, toy_data, tmp_path / "run")


# --- servers


def test_a_token_that_nobody_wants_is_a_warning() -> None:
    assert servers.judge_token(True, TOKEN_VARIABLE, URL).found == "accepted"
    assert servers.judge_token(False, "", URL).status == "ok"
    finding = servers.judge_token(False, TOKEN_VARIABLE, URL)
    assert finding.status == "warn"
    assert TOKEN_VARIABLE in finding.found


def test_settings_of_a_server_are_held_against_the_config(config: Config) -> None:
    assert servers.judge_settings(config, URL, info_of(), "gloo")[0].status == "ok"
    (other,) = servers.judge_settings(config, URL, info_of(), "nccl")
    assert other.status == "fail"
    assert "over gloo, the learner's over nccl" in other.found
    few = servers.judge_settings(config, URL, info_of(max_num_seqs=1, world_size=64), "gloo")
    assert "decodes 1 sequences" in few[0].found
    short = servers.judge_settings(config, URL, info_of(max_model_len=64), "gloo", needed=65)
    assert (worst(short), "at most 64 tokens" in short[0].found) == ("warn", True)
    assert worst(servers.judge_settings(config, URL, info_of(max_model_len=65), "gloo", 65)) == "ok"
    assert worst(servers.judge_together(config, [info_of()], {})) == "ok"
    assert worst(servers.judge_together(config, [info_of()], {"WORLD_SIZE": "4096"})) == "fail"


# --- ports


def test_a_server_behind_a_tunnel_is_doubted() -> None:
    finding = weights.judge_address(URL, "127.0.0.1", "127.0.0.1", "learn-0", "serve-0")
    assert finding.status == "warn"
    assert "tunnel" in finding.found
    for ip, there in (("127.0.0.1", "learn-0"), ("10.0.0.2", "serve-0"), ("127.0.0.1", "")):
        assert weights.judge_address(URL, ip, "10.0.0.1", "learn-0", there).status == "ok"
    nowhere, resolved = weights.address(URL, "no-such-host.invalid", "")
    assert nowhere.status == "fail"
    assert resolved is None


@pytest.mark.parametrize(
    ("resolved", "environment", "status"),
    [
        ("10.0.0.1", {}, "ok"),
        ("127.0.1.1", {}, "warn"),
        ("", {}, "warn"),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth1"}, "ok"),
    ],
)
def test_a_name_that_means_loopback_needs_an_interface(
    resolved: str, environment: dict[str, str], status: str
) -> None:
    assert weights.judge_own_name("learn-0", resolved, environment).status == status
    assert weights.own_name(["127.0.0.1"], {}) is None


def test_a_group_port_is_free_or_its_holder_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        taken = weights.group_port(URL, "127.0.0.1", port)
    assert taken.status == "fail"
    assert f"127.0.0.1:{port} is taken by " in taken.found
    assert weights.listener(port) is None
    assert weights.group_port(URL, "127.0.0.1", port).status == "ok"
    assert weights.judge_port(URL, "10.0.0.1:1", "silent", None).status == "warn"
    assert "cannot be seen" in weights.judge_port(URL, "10.0.0.1:1", "taken", None).found


# --- servers


def server_of(url: str) -> ServerConfig:
    address = {"base_url": url, "group_port": 51216}
    return ServerConfig.model_validate({"servers": [address], "timeout_s": 5})


def reach(url: str) -> list[Finding]:
    server = server_of(url)
    with ExitStack() as closing:
        return servers.reach(server.servers[0], server, UNKNOWN, closing).findings


def test_a_token_of_a_file_counts_as_given_and_one_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("correct-horse")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    with scripted_server() as server:
        token = by_check(reach(server.base_url))["token"]
        assert token.status == "warn"
        assert token.found.startswith(f"{TOKEN_FILE_VARIABLE} is set, and the server takes")
        file.unlink()
        found = by_check(reach(server.base_url))
    assert (found["token"].status, found["http"].status) == ("fail", "skipped")
    assert "cannot be read" in found["token"].found


def test_the_number_of_learner_processes_that_is_taken_is_named(config: Config) -> None:
    (found,) = servers.judge_together(config, [info_of(world_size=2)], {})
    assert "1 learner process(es), which WORLD_SIZE=N says otherwise" in found.found


# --- the weights' way


def refusal(kind: str, phase: str) -> WeightSyncError:
    error = WeightSyncError("server", URL, phase, "it broke")  # type: ignore[arg-type]
    error.__cause__ = ProblemError(Problem.of(kind, "no", "w"))
    return error


@pytest.mark.parametrize(
    ("kind", "phase", "version", "status"),
    [
        ("weights-differ", "start", 0, "warn"),
        ("weights-differ", "start", 3, "skipped"),
        ("weights-differ", "verify", 0, "fail"),
        ("manifest-mismatch", "start", 0, "fail"),
        ("weight-transfer-failed", "transfer", 0, "fail"),
        ("weight-update-order", "start", 3, "skipped"),
    ],
)
def test_what_a_refused_trial_means(kind: str, phase: str, version: int, status: str) -> None:
    finding = weights.judge_refusal(refusal(kind, phase), version, "a.weight", URL)
    assert finding.status == status
    assert finding.do or kind == "weight-update-order"


def test_a_server_that_lacks_a_push_waits_for_it() -> None:
    assert weights.needs_push_first(info_of()) is None
    poisoned = info_of().model_copy(update={"weights_state": "POISONED"})
    behind = info_of(replicas=2)
    behind.replicas[1].state = "needs-push"
    for info in (poisoned, behind):
        assert "the first push of the run mends it" in str(weights.needs_push_first(info))
    assert "replica 1 lacks" in str(weights.needs_push_first(behind))


def test_a_server_to_which_a_run_pushes_is_left_alone() -> None:
    assert weights.untouchable(info_of()) is None
    busy = info_of().model_copy(
        update={"weight_group": "10.0.0.1:51216", "weight_group_heard_s": 1.0}
    )
    assert "a run pushes to this server" in str(weights.untouchable(busy))
    for heard_s in (None, 60.0):
        left = busy.model_copy(update={"weight_group_heard_s": heard_s})
        assert "gives no sign of life" in str(weights.untouchable(left))
        assert "10.0.0.1:51216" in str(weights.untouchable(left))
    pushed = info_of().model_copy(update={"weights_state": "UPDATING"})
    assert weights.untouchable(pushed) is not None


# --- asking


def refused(kind: str, detail: str, *wheres: str) -> ProblemError:
    errors = [{"where": where, "detail": detail} for where in wheres]
    return ProblemError(Problem.of(kind, detail, "infer_requests", errors or None))


def test_why_a_server_gave_no_answer(toy_data: ToyData) -> None:
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)[:2]
    requests = [build_request(sample, "Detect.", None) for sample in samples]
    spots = ("infer_requests[0].images[0]", "infer_requests[1].images[0]")
    outside = refused("invalid-request", "in no directory (--allowed-media-dir)", *spots)
    (unread,) = servers.unanswered(outside, requests, URL)
    assert str(samples[0].images[0]) in unread.found
    assert "--allowed-media-dir" in unread.do
    gone = refused("invalid-request", "no such file", spots[1])
    (unread,) = servers.unanswered(gone, requests, URL)
    assert str(samples[1].images[0]) in unread.found
    assert "same path" in unread.do
    (waits,) = servers.unanswered(refused("weights-poisoned", "broke"), requests, URL)
    assert waits.status == "skipped"
    (large,) = servers.unanswered(refused("body-too-large", "9 MiB"), requests, URL)
    assert "--max-body-mib" in large.do
    (lost,) = servers.unanswered(ServerUnreachable("gone"), requests, URL)
    assert (lost.status, lost.found) == ("fail", "gone")


def test_an_image_that_only_the_server_can_read_is_a_finding(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    sample = read_samples(toy_data.train_jsonl, allow_poly=False)[0]
    away = replace(sample, images=(tmp_path / "away.png",))
    request = build_request(away, "Detect.", None)
    processor = AutoProcessor.from_pretrained(toy_checkpoint)
    answered = envelope([1], [1, 2])
    finding = servers.prompts([away], [request], [answered], processor, URL)
    assert (finding.check, finding.status) == ("prompt", "fail")
    assert "away.png" in finding.found


@pytest.mark.req("RES-16")
def test_a_server_prompt_must_have_every_id_of_the_learners(
    toy_checkpoint: Path, toy_data: ToyData
) -> None:
    sample = read_samples(toy_data.train_jsonl, allow_poly=False)[0]
    request = build_request(sample, "Detect.", None)
    processor = AutoProcessor.from_pretrained(toy_checkpoint)
    ours = encode_request(processor, request).ids.tolist()

    def finding(theirs: list[int]) -> Finding:
        return servers.prompts([sample], [request], [envelope([1], theirs)], processor, URL)

    assert finding(ours).found == f"1 prompts of {len(ours)} tokens agree"
    for theirs in ([], ours[:3], ours[:-1], [*ours, ours[-1]]):
        differs = finding(theirs)
        assert (differs.check, differs.status) == ("prompt", "fail")
        assert f"position {min(len(theirs), len(ours))}" in differs.found
        assert "no token" in differs.found
        assert f"lengths {len(ours)} and {len(theirs)}" in differs.found


def test_one_sample_of_every_folder_is_asked_about(toy_data: ToyData) -> None:
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)
    elsewhere = replace(samples[5], images=(Path("/elsewhere/a.png"),))
    chosen = servers.choose([*samples, elsewhere])
    assert len(chosen) == servers.ASKED
    assert {sample.images[0].parent for sample in chosen} == {
        samples[0].images[0].parent,
        Path("/elsewhere"),
    }


def test_what_the_parser_says_of_an_answer(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = toy_tokenizer.encode("no answer", add_special_tokens=False)
    finding = servers.judge_answer(envelope(ids, [1]), toy_tokenizer, 0.5, URL)
    assert finding.found.startswith(f"{len(ids)} tokens in 0.50 s, ended by stop; ")
    assert "invalid" in finding.found
