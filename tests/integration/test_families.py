"""The loop with a toy of each model family except Qwen3-VL, which all other tests use.

A run pushes its weights, trains on the answers, and pushes the trained weights: to a real server,
with every parameter verified.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from learner.config import load_mapping, merge, parse_config
from learner.data.toy import make_data
from learner.models.toy import ToyFamily
from tests.contract.running_server import RunningServer, running_server
from tests.contract.toy_checkpoints import make_checkpoint
from tests.integration.recorded_run import Recorder, greedy_answers, run_recorded
from tests.integration.shared_server import address_of

ROOT = Path(__file__).resolve().parents[2]
FAMILIES: tuple[ToyFamily, ...] = ("qwen2_5_vl", "qwen3_vl_moe")

pytestmark = [pytest.mark.req("FAM-01"), pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Loop:
    """before: answers of the server before the first push."""

    server: RunningServer
    media: Path
    before: list[list[int]]
    recorder: Recorder


@pytest.fixture(scope="module", params=FAMILIES)
def loop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loop]:
    """A run of two steps of channel B."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder / "model", seed=1, family=request.param)
    with running_server(model, folder / "server") as server:
        media = server.media / "toy"
        data = make_data(media, train=4, val=2, seed=0)
        before = greedy_answers(server, media)
        address = address_of(server.process.base_url)
        sections = {
            "model": {"model": str(model)},
            "data": {"train_jsonl": str(data.train_jsonl), "val_jsonl": str(data.val_jsonl)},
            "training": {
                "output_dir": str(folder / "run"),
                "max_steps": 2,
                "effective_batch_size": 4,
                "learning_rate": 0.01,
                "lr_scheduler_type": "constant",
                "warmup_ratio": 0.0,
                "save_strategy": "no",
            },
            "stage2_ab": {"schedule": {"b_ratio": 1.0}},
            "rollout_matching": {
                "max_new_tokens": 24,
                "vllm": {"server": {"servers": [address]}, "sync": {"verify": "full"}},
            },
        }
        mapping = load_mapping(ROOT / "configs" / "demo" / "two_channel.yaml")
        recorder = run_recorded(server, parse_config(merge(mapping, sections)))
        yield Loop(server, media, before, recorder)


@pytest.mark.req("SYNC-02", "SYNC-06", "STEP-01")
def test_a_run_pushes_what_it_has_trained(loop: Loop) -> None:
    """Before each step. The first weights are the checkpoint's; the second ones are trained."""
    first, second = loop.recorder.said.values()
    assert loop.before == first != second
    assert [result.prompt for result in loop.recorder.probed] == ["text", "image"] * 2
    assert not any(result.difference for result in loop.recorder.probed)


@pytest.mark.req("SYNC-02", "SYNC-03")
def test_after_every_push_the_server_answers_like_a_fresh_engine(
    loop: Loop, tmp_path: Path
) -> None:
    checkpoint, said = list(loop.recorder.said.items())[-1]
    readable = ("--allowed-media-dir", str(loop.server.media))
    with running_server(checkpoint, tmp_path / "fresh", *readable) as fresh:
        assert greedy_answers(fresh, loop.media) == said
