"""The whole loop with a toy of each model family but Qwen3-VL, which all other tests have.

A run trains in channel A, pushes what it has trained, and trains in channel B on the answers: on a
real server, with every parameter verified.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from learner.config import load_mapping, merge, parse_config
from learner.data.toy import make_data
from learner.models.toy import ToyFamily
from learner.rollout.server_process import free_ports
from tests.contract.running_server import RunningServer, running_server
from tests.contract.toy_checkpoints import make_checkpoint
from tests.integration.recorded_run import Recorder, greedy_answers, run_recorded

ROOT = Path(__file__).resolve().parents[2]
FAMILIES: tuple[ToyFamily, ...] = ("qwen2_5_vl", "qwen3_vl_moe")

pytestmark = [pytest.mark.req("FAM-01"), pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Loop:
    """before: what the server said before the first push."""

    server: RunningServer
    media: Path
    before: list[list[int]]
    recorder: Recorder


@pytest.fixture(scope="module", params=FAMILIES)
def loop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loop]:
    """A run of four steps in which channels A and B take turns."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder / "model", seed=1, family=request.param)
    with running_server(model, folder / "server") as server:
        media = server.media / "toy"
        data = make_data(media, train=16, val=2, seed=0)
        before = greedy_answers(server, media)
        (group_port,) = free_ports(1)
        address = {"base_url": server.process.base_url, "group_port": group_port}
        sections = {
            "model": {"model": str(model)},
            "data": {"train_jsonl": str(data.train_jsonl), "val_jsonl": str(data.val_jsonl)},
            "training": {
                "output_dir": str(folder / "run"),
                "max_steps": 4,
                "effective_batch_size": 4,
                "learning_rate": 0.01,
                "lr_scheduler_type": "constant",
                "warmup_ratio": 0.0,
                "save_strategy": "no",
            },
            "stage2_ab": {"schedule": {"b_ratio": 0.5}},
            "rollout_matching": {
                "max_new_tokens": 64,
                "vllm": {"server": {"servers": [address]}, "sync": {"verify": "full"}},
            },
        }
        mapping = load_mapping(ROOT / "configs" / "demo" / "two_channel.yaml")
        recorder = run_recorded(server, parse_config(merge(mapping, sections)))
        yield Loop(server, media, before, recorder)


@pytest.mark.req("SYNC-02", "SYNC-06", "STEP-01")
def test_a_run_pushes_what_it_has_trained(loop: Loop) -> None:
    """Before each of the two steps of channel B; answers change, and are the learner's own."""
    first, second = loop.recorder.said.values()
    assert loop.before != first != second
    assert [result.prompt for result in loop.recorder.probed] == ["text", "image"] * 2
    assert not any(result.difference for result in loop.recorder.probed)


@pytest.mark.req("SYNC-02", "SYNC-03")
def test_the_server_answers_like_a_fresh_engine(loop: Loop, tmp_path: Path) -> None:
    checkpoint, said = list(loop.recorder.said.items())[-1]
    readable = ("--allowed-media-dir", str(loop.server.media))
    with running_server(checkpoint, tmp_path / "fresh", *readable) as fresh:
        assert greedy_answers(fresh, loop.media) == said
