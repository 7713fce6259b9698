"""Keys that only one place reads, each with a value that is not its default.

The keys of losses, packing and matching are in the tests of those.
"""

import threading
from pathlib import Path
from typing import Any

import pytest

from learner.config.schema import Config
from learner.models.load import load_model
from learner.rollout.client import ServerUnreachable
from learner.rollout.policy import request_settings
from learner.rollout.server_process import free_ports
from learner.runs.rollout_log import StepAnswer
from learner.training.backends import bucket_bytes_of
from learner.training.channels import recipe_of
from learner.training.server_checks import reach_servers
from learner.training.train import order_of
from learner.training.trainer import training_arguments
from learner.types import Sample
from shared_contracts.infer import InferCall, Message, RequestConfig, RolloutInferRequest
from tests.unit.scripted_server import info, scripted_server
from tests.unit.small_run import ConfigOf, run_quietly

LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 6}


def test_the_model_is_loaded_as_its_sections_say(config_of: ConfigOf) -> None:
    adapter = LORA | {"lora_dropout": 0.25, "use_dora": True, "target_modules": ["q_proj"]}
    own = {"attn_implementation": "eager", "gradient_checkpointing": True}
    model: Any = load_model(config_of(model=own, tuner=adapter)).model
    assert model.config.get_text_config()._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "eager"
    assert model.is_gradient_checkpointing
    made = model.peft_config["default"]
    assert (made.r, made.lora_alpha, made.lora_dropout, made.use_dora) == (2, 6, 0.25, True)
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj"}


def test_a_prompt_of_training_has_the_system_message(
    config_of: ConfigOf, scenes: list[Sample]
) -> None:
    def tokens(system: str | None) -> int:
        config = config_of(template={"system": system})
        (segment,) = recipe_of(config, load_model(config)).channel_a.segments(scenes[:1])
        return len(segment.prompt.ids)

    assert tokens("Be brief.") > tokens(None)


def test_the_trainer_has_the_arguments_of_the_config(config_of: ConfigOf, tmp_path: Path) -> None:
    own = {
        "learning_rate": 3e-4,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "save_steps": 2,
        "seed": 7,
        "run_name": "mine",
        "max_steps": 5,
    }
    made = training_arguments(config_of(training=own | {"warmup_ratio": 0.25}), tmp_path)
    assert {key: getattr(made, key) for key in own} == own
    assert made.warmup_steps == 0.25
    longer = {"max_steps": None, "num_train_epochs": 2.5, "save_strategy": "no"}
    training = longer | {"eval_strategy": "steps", "eval_steps": 2}
    config = config_of(training=training, model={"torch_dtype": "bfloat16"})
    made = training_arguments(config, tmp_path)
    assert (made.max_steps, made.num_train_epochs) == (-1, 2.5)
    assert (made.eval_strategy, made.eval_steps, made.save_strategy) == ("steps", 2, "no")


def test_samples_keep_the_order_of_the_file_unless_they_are_shuffled(config_of: ConfigOf) -> None:
    def first_step(shuffle: bool) -> list[int]:
        config = config_of(data={"shuffle": shuffle})
        return order_of(config, samples=24, processes=1).rank_batch(step=0, rank=0)

    assert first_step(shuffle=False) == [0, 1, 2, 3]
    assert first_step(shuffle=True) != [0, 1, 2, 3]


@pytest.mark.req("CFG-05", "CFG-09")
@pytest.mark.scenario("Canonical grouped config drives trainer contract")
def test_canonical_grouped_rollout_config_is_visible_to_trainer(config_of: ConfigOf) -> None:
    sampled = {"temperature": 0.5, "top_p": 0.9, "top_k": 40}
    rollout = {"max_new_tokens": 77, "repetition_penalty": 1.1, "decoding": sampled}
    config = config_of(rollout_matching=rollout | {"decode_mode": "sampling"})
    request = request_settings(config).config
    assert request.model_dump(include={"temperature", "top_p", "top_k"}) == sampled
    assert (request.max_tokens, request.repetition_penalty) == (77, 1.1)


@pytest.mark.req("SYNC-03")
def test_buckets_have_the_configured_size(config_of: ConfigOf) -> None:
    def config(bucket_mib: int | None) -> Config:
        return config_of(rollout_matching={"vllm": {"sync": {"bucket_mib": bucket_mib}}})

    assert bucket_bytes_of(config(3), "gloo") == bucket_bytes_of(config(3), "nccl") == 3 * 2**20
    assert bucket_bytes_of(config(None), "gloo") < bucket_bytes_of(config(None), "nccl")


@pytest.mark.req("CFG-06")
def test_clients_have_the_timeouts_of_the_config(config_of: ConfigOf) -> None:
    end = threading.Event()
    request = RolloutInferRequest(messages=[Message(role="user", content="Detect.")])
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: info(max_num_seqs=64)
        server.routes["POST /infer/"] = lambda _: end.wait(60) and []
        address = {"base_url": server.base_url, "group_port": free_ports(1)[0]}
        section = {"servers": [address], "timeout_s": 12.5, "infer_timeout_s": 0.5}
        (client,) = reach_servers(config_of(rollout_matching={"vllm": {"server": section}}))
        assert client.timeout_s == 12.5
        with pytest.raises(ServerUnreachable, match="timed out"):
            client.infer(InferCall(infer_requests=[request], request_config=RequestConfig()))
        end.set()


@pytest.mark.req("APPEND-01", "MET-03")
@pytest.mark.parametrize("logged", [True, False])
def test_a_run_writes_answers_in_the_configured_order_and_curves_in_the_configured_folder(
    config_of: ConfigOf, tmp_path: Path, logged: bool
) -> None:
    training = {"max_steps": 1, "save_strategy": "no", "logging_dir": str(tmp_path / "curves")}
    config = config_of(
        custom={"object_field_order": "geometry_first"},
        training=training | {"log_rollouts": logged},
        stage2_ab={"schedule": {"b_ratio": 1.0}},
        rollout_matching={"rollout_backend": "hf", "max_new_tokens": 4, "decode_batch_size": 4},
    )
    folder = run_quietly(config)
    assert any((tmp_path / "curves").glob("events.*"))
    assert not (folder / "tensorboard").exists()
    assert (folder / "metrics.jsonl").exists()
    assert (folder / "rollouts").exists() == logged
    if logged:
        lines = (folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()
        answers = [StepAnswer.model_validate_json(line) for line in lines]
        tokenizer: Any = load_model(config).tokenizer
        texts = [tokenizer.decode(answer.target.ids) for answer in answers if answer.target]
        assert any('"bbox_2d"' in text for text in texts)
        assert all(text.find('"bbox_2d"') <= text.find('"desc"') for text in texts)
