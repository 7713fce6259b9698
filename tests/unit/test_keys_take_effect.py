"""Keys that one place alone reads, each with a value that is not its default: ignoring it shows.

What the keys mean to the losses, the packing and the matching is in the tests of those.
"""

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.models.load import LoadedModel, load_model
from learner.models.self_context import SelfContext
from learner.rollout.client import ServerUnreachable
from learner.rollout.policy import asking_of
from learner.runs.rollout_log import StepAnswer
from learner.training.backends import bucket_bytes_of
from learner.training.recipes.two_channel import TwoChannel
from learner.training.start_checks import check_inputs, reach_servers
from learner.training.train import order_of, train
from learner.training.trainer import build_optimizer, training_arguments
from shared_contracts.infer import InferCall, Message, RequestConfig, RolloutInferRequest
from tests.unit.scripted_server import info, scripted_server
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 6}


ConfigOf = Callable[[dict[str, Any]], Config]


@pytest.fixture
def config_of(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> ConfigOf:
    """A run of three steps of four samples, but for these sections."""
    mapping = small_mapping(toy_checkpoint, toy_data, tmp_path / "run")
    return lambda sections: parse_config(merge(mapping, sections))


@pytest.fixture
def loaded(config_of: ConfigOf, request: pytest.FixtureRequest) -> LoadedModel:
    """The toy model by a config with the sections of the test's parameter."""
    return load_model(config_of(request.param))


@pytest.mark.parametrize("loaded", [{"model": {"attn_implementation": "eager"}}], indirect=True)
def test_the_attention_is_the_one_that_is_named(loaded: LoadedModel) -> None:
    model: Any = loaded.model
    assert model.config.get_text_config()._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "eager"


@pytest.mark.parametrize("loaded", [{"model": {"gradient_checkpointing": True}}], indirect=True)
def test_activations_are_made_again(loaded: LoadedModel) -> None:
    model: Any = loaded.model
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize(
    "loaded",
    [{"tuner": LORA | {"lora_dropout": 0.25, "use_dora": True, "target_modules": ["q_proj"]}}],
    indirect=True,
)
def test_adapters_are_made_as_the_tuner_says(loaded: LoadedModel) -> None:
    model: Any = loaded.model
    made = model.peft_config["default"]
    assert (made.r, made.lora_alpha, made.lora_dropout, made.use_dora) == (2, 6, 0.25, True)
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj"}


@pytest.mark.parametrize(
    ("key", "value", "argument"),
    [
        ("learning_rate", 3e-4, "learning_rate"),
        ("lr_scheduler_type", "linear", "lr_scheduler_type"),
        ("warmup_ratio", 0.25, "warmup_steps"),
        ("max_grad_norm", 0.5, "max_grad_norm"),
        ("save_steps", 2, "save_steps"),
        ("seed", 7, "seed"),
        ("run_name", "mine", "run_name"),
        ("max_steps", 5, "max_steps"),
    ],
)
def test_the_trainer_is_told(
    config_of: ConfigOf, tmp_path: Path, key: str, value: Any, argument: str
) -> None:
    arguments = training_arguments(config_of({"training": {key: value}}), tmp_path)
    assert getattr(arguments, argument) == value


def test_the_trainer_is_told_when_to_evaluate_and_how_long_but_no_type(
    config_of: ConfigOf, tmp_path: Path
) -> None:
    longer = {"max_steps": None, "num_train_epochs": 2.5, "save_strategy": "no"}
    training = longer | {"eval_strategy": "steps", "eval_steps": 2}
    config = config_of({"training": training, "model": {"torch_dtype": "bfloat16"}})
    told = training_arguments(config, tmp_path)
    assert (told.max_steps, told.num_train_epochs) == (-1, 2.5)
    assert (told.eval_strategy, told.eval_steps, told.save_strategy) == ("steps", 2, "no")
    assert told.mixed_precision == "no"  # the project's own: test_precision.py


def test_the_optimizer_has_the_betas(config_of: ConfigOf) -> None:
    config = config_of({"training": {"adam_beta1": 0.8, "adam_beta2": 0.7}})
    optimizer = build_optimizer(torch.nn.Linear(2, 2), config.training)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.7)}


def test_samples_keep_the_order_of_the_file_unless_they_are_shuffled(config_of: ConfigOf) -> None:
    def first_step(shuffle: bool) -> list[int]:
        config = config_of({"data": {"shuffle": shuffle}})
        return order_of(config, samples=24, processes=1).rank_batch(step=0, rank=0)

    assert first_step(shuffle=False) == [0, 1, 2, 3]
    assert first_step(shuffle=True) != [0, 1, 2, 3]


@pytest.mark.req("CHA-01")
def test_channel_a_feeds_back_what_is_asked_for(config_of: ConfigOf) -> None:
    own = {"n_softctx_iter": 3, "coord_ctx_embed_mode": "soft", "softctx_grad_mode": "em_detach"}
    assert TwoChannel.self_context(config_of({"stage2_ab": own})) == SelfContext(
        3, "soft", "em_detach"
    )


def test_answers_are_asked_for_with_both_texts(config_of: ConfigOf) -> None:
    template = {"system": "You see boxes.", "prompt": "Find them."}
    asking = asking_of(config_of({"template": template}))
    assert (asking.system, asking.prompt) == ("You see boxes.", "Find them.")


@pytest.mark.req("SYNC-03")
def test_buckets_are_as_large_as_asked_for(config_of: ConfigOf) -> None:
    def config(bucket_mib: int | None) -> Config:
        sync = {"bucket_mib": bucket_mib}
        return config_of({"rollout_matching": {"vllm": {"sync": sync}}})

    assert bucket_bytes_of(config(3), "gloo") == bucket_bytes_of(config(3), "nccl") == 3 * 2**20
    assert bucket_bytes_of(config(None), "gloo") == 8 * 2**20
    assert bucket_bytes_of(config(None), "nccl") == 512 * 2**20


@pytest.mark.req("CFG-06")
def test_clients_wait_as_long_as_the_config_says(config_of: ConfigOf) -> None:
    let_go = threading.Event()
    request = RolloutInferRequest(messages=[Message(role="user", content="Detect.")])
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: info(max_num_seqs=64)
        server.routes["POST /infer/"] = lambda _: let_go.wait(20) and []
        address = {"base_url": server.base_url, "group_port": 51216}
        told = {"servers": [address], "timeout_s": 12.5, "infer_timeout_s": 0.5}
        (client,) = reach_servers(config_of({"rollout_matching": {"vllm": {"server": told}}}))
        with client:
            assert client.timeout_s == 12.5
            with pytest.raises(ServerUnreachable, match="timed out"):
                client.infer(InferCall(infer_requests=[request], request_config=RequestConfig()))
        let_go.set()


def run_of_channel_b(
    model: Path, data: ToyData, out: Path, custom: dict[str, Any], training: dict[str, Any]
) -> tuple[Config, Path]:
    """One step on answers of the learner's own."""
    steps = {"max_steps": 1, "save_strategy": "no"}
    mapping = small_mapping(model, data, out, custom=custom, training=steps | training)
    own = {"rollout_backend": "hf", "max_new_tokens": 4, "decode_batch_size": 4}
    mapping["rollout_matching"] = own
    mapping["stage2_ab"]["schedule"]["b_ratio"] = 1.0
    config = parse_config(mapping)
    return config, train(config, check_inputs(config), [], Console(file=io.StringIO()))


@pytest.mark.req("APPEND-01")
def test_a_run_writes_objects_in_the_order_asked_for_and_curves_where_asked_for(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    curves = tmp_path / "curves"
    config, folder = run_of_channel_b(
        toy_checkpoint,
        toy_data,
        tmp_path / "run",
        {"object_field_order": "geometry_first"},
        {"logging_dir": str(curves)},
    )
    lines = (folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    answers = [StepAnswer.model_validate_json(line) for line in lines]
    tokenizer: Any = load_model(config).tokenizer
    taught = [tokenizer.decode(answer.target.ids) for answer in answers if answer.target]
    assert any('"bbox_2d"' in text for text in taught)
    assert all(text.find('"bbox_2d"') <= text.find('"desc"') for text in taught)
    assert any(curves.glob("events.*"))
    assert not (folder / "tensorboard").exists()


@pytest.mark.req("MET-03")
def test_a_run_writes_no_answers_where_none_are_asked_for(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    _, folder = run_of_channel_b(
        toy_checkpoint, toy_data, tmp_path / "run", {}, {"log_rollouts": False}
    )
    assert (folder / "metrics.jsonl").exists()
    assert not (folder / "rollouts").exists()
