"""Removed, moved and not yet served keys fail fast and say what to do instead."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from learner.config import Config, parse_config
from learner.config.moved_keys import RETIRED_KEYS, RETIRED_VALUES, retired_errors
from learner.config.rollout_matching import RolloutMatchingConfig
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import bare_type, is_model
from tests.unit.config_faults import ALIGNED, WARMUP, changed, errors_of, only_error

OLD_ROLLOUT = "custom.extra.rollout_matching"


def refused(dotted: str, value: Any) -> ContractError:
    """The one fault of a config with this value, which is told at its own path."""
    error = only_error(changed(dotted, value))
    assert error.where == dotted
    return error


def leaves(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted keys of a section; a list counts as one key."""
    for name, field in model.model_fields.items():
        below = bare_type(field.annotation)
        if is_model(below):
            yield from leaves(below, f"{path}{name}.")
        else:
            yield f"{path}{name}"


@pytest.mark.req("CFG-03")
@pytest.mark.parametrize("key", [k for k in RETIRED_KEYS if "[]" not in k and "*" not in k])
@pytest.mark.parametrize("value", [None, 1, {"any": "thing"}], ids=["null", "scalar", "mapping"])
def test_every_retired_key_is_the_one_error_of_a_config(key: str, value: Any) -> None:
    assert refused(key, value).do == RETIRED_KEYS[key].do


@pytest.mark.req("CFG-03")
@pytest.mark.parametrize(
    ("path", "value"),
    [(p, v) for p, values in RETIRED_VALUES.items() for v in values if "[]" not in p],
)
def test_every_retired_value_is_the_one_error_of_a_config(path: str, value: str) -> None:
    error = refused(path, value)
    assert value in error.found
    assert error.do == RETIRED_VALUES[path][value].do


def value_at(document: Any, path: str) -> Any:
    """The value of a path of advice: `[]` is any item of a list, `[name=x]` the one of that name.

    KeyError where there is none.
    """
    for key, index in re.findall(r"(\w+)(\[[^\]]*\])?", path):
        document = document[key]
        if index:
            name = index.strip("[]").removeprefix("name=")
            document = next(item for item in document if not name or item["name"] == name)
    return document


SECTIONS = "|".join(Config.model_fields)


@pytest.mark.req("CFG-03")
@pytest.mark.parametrize("key", RETIRED_KEYS)
def test_every_advice_leads_to_a_key_that_is_accepted(key: str) -> None:
    config = parse_config(changed("rollout_matching.vllm.server.timeout_s", 9.0)).model_dump()
    advised = re.findall(rf"\b(?:{SECTIONS})(?:\.\w+(?:\[[^\]]*\])?)+", RETIRED_KEYS[key].do)
    for path in advised:
        pattern = re.sub(r"\[[^\]]*\]", "[]", path)
        assert pattern not in RETIRED_KEYS
        if not pattern.startswith("rollout_matching.pipeline"):  # the other variant's
            value_at(config, path)


@pytest.mark.req("CFG-02", "CFG-03")
@pytest.mark.parametrize("section", ["model", "data", "training", "tuner", "rollout_matching"])
@pytest.mark.parametrize("key", ["deepspeed", "quantization", "rlhf", "debug", "experiment"])
def test_no_key_is_sent_to_a_section_that_has_no_keys(section: str, key: str) -> None:
    error = only_error(changed(f"{section}.{key}", "zero2"))
    assert error.where == f"{section}.{key}"
    assert error.do.startswith("Remove it")
    assert only_error(changed(key, {"config": 1})).do == "Remove it: there are no keys here"
    assert only_error(changed(key, "zero2")).do == "Remove it: there are no keys here"


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize(
    ("key", "value", "do"),
    [
        ("training.packing", "yes", "Write true or false"),
        ("data.shuffle", 1, "Write true or false"),
        ("training.report_to", "wandb", "Write a list, such as [wandb]"),
        ("rollout_matching.vllm.server.servers", {"a": 1}, "Write a list"),
        ("training.learning_rate", "x", "Write a number"),
        ("training.max_steps", 1.5, "Write a whole number"),
        ("training.run_name", 3, "Write text, in quotes where it looks like a number"),
        (
            "tuner",
            {"train_type": "lora", "lora_rank": 2, "lora_alpha": 2, "target_modules": "q_proj"},
            "Use 'all-linear', or write a list, such as [q_proj]",
        ),
    ],
)
def test_a_value_of_another_type_is_told_in_words_of_yaml(key: str, value: Any, do: str) -> None:
    assert only_error(changed(key, value)).do == do


@pytest.mark.req("CFG-03")
def test_no_retired_key_is_a_key_that_is_served() -> None:
    served = set(leaves(Config))
    for key in RETIRED_KEYS:
        assert not any(f"{leaf}.".startswith(f"{key}.") for leaf in served), key


@pytest.mark.req("CFG-03")
@pytest.mark.parametrize("base", [WARMUP, ALIGNED], ids=["two-channel", "rollout-aligned"])
def test_a_config_of_today_holds_nothing_retired(base: dict[str, Any]) -> None:
    assert list(retired_errors(base)) == []


@pytest.mark.req("RES-01")
@pytest.mark.scenario(
    "Any legacy rollout key path fails fast",
    "Legacy decode key path fails fast",
    "Legacy rollout backend key path fails fast",
)
@pytest.mark.parametrize("key", list(leaves(RolloutMatchingConfig)))
def test_every_key_names_its_path_out_of_the_old_rollout_section(key: str) -> None:
    assert refused(f"{OLD_ROLLOUT}.{key}", 3).do == f"Use rollout_matching.{key}"


@pytest.mark.req("RES-01", "RES-06", "CFG-03")
@pytest.mark.scenario("Legacy decoding keys fail fast")
@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("temperature", "rollout_matching.decoding.temperature"),
        ("top_p", "rollout_matching.decoding.top_p"),
        ("top_k", "rollout_matching.decoding.top_k"),
        ("rollout_generate_batch_size", "rollout_matching.decode_batch_size"),
        ("rollout_infer_batch_size", "rollout_matching.decode_batch_size"),
        ("vllm.server.base_url", "rollout_matching.vllm.server.servers[].base_url"),
    ],
)
def test_a_key_that_moved_twice_names_its_last_path(key: str, new: str) -> None:
    assert refused(f"{OLD_ROLLOUT}.{key}", 3).do == f"Use {new}"


@pytest.mark.req("RES-01", "RES-06")
@pytest.mark.parametrize("key", ["rollout_buffer", "post_rollout_pack_scope"])
def test_a_key_removed_from_the_old_rollout_section_names_no_new_path(key: str) -> None:
    assert refused(f"{OLD_ROLLOUT}.{key}", 3).do.startswith("Remove it")


@pytest.mark.req("RES-01", "CFG-02")
@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("temprature", "rollout_matching.decoding.temperature"),
        ("decode_batch_siz", "'decode_batch_size'"),
        ("vllm.server.timeout", "'timeout_s'"),
    ],
)
def test_a_misspelt_key_of_the_old_rollout_section_names_no_path_that_is_not_there(
    key: str, near: str
) -> None:
    error = refused(f"{OLD_ROLLOUT}.{key}", 3)
    assert error.found == f"this section has moved, and there is no rollout_matching.{key}"
    assert error.do.startswith(f"The nearest known key is {near}")


@pytest.mark.req("RES-01")
def test_every_key_of_the_old_rollout_section_is_told_at_once() -> None:
    old = {"decode_batch_size": 1, "vllm": {"mode": "server", "sync": {"mode": "full"}}}
    assert list(errors_of(changed(OLD_ROLLOUT, old))) == [
        f"{OLD_ROLLOUT}.decode_batch_size",
        f"{OLD_ROLLOUT}.vllm.mode",
        f"{OLD_ROLLOUT}.vllm.sync.mode",
    ]


@pytest.mark.req("RES-01")
@pytest.mark.parametrize("value", [None, {}])
def test_the_old_rollout_section_fails_even_when_empty(value: Any) -> None:
    assert "rollout_matching" in refused(OLD_ROLLOUT, value).do


@pytest.mark.req("RES-02")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stage2_ab_training", "stage2_two_channel"),
        ("rollout_matching_sft", "stage2_rollout_aligned"),
    ],
)
@pytest.mark.parametrize("base", [WARMUP, ALIGNED], ids=["two-channel", "rollout-aligned"])
def test_an_old_trainer_variant_names_the_new_one(base: dict[str, Any], old: str, new: str) -> None:
    error = only_error(changed("custom.trainer_variant", old, base))
    assert error.where == "custom.trainer_variant"
    assert error.do == f"Use {new}"


@pytest.mark.req("RES-03", "CFG-03")
@pytest.mark.scenario(
    "Multi-server pairing is strict and deterministic",
    "Legacy rollout server paired-list shape fails fast",
)
def test_the_paired_list_form_of_servers_fails_fast() -> None:
    server = {"base_url": ["http://127.0.0.1:8000"], "group_port": [51216]}
    errors = errors_of(changed("rollout_matching.vllm.server", server))
    where = "rollout_matching.vllm.server"
    assert set(errors) == {f"{where}.base_url", f"{where}.group_port", f"{where}.servers"}
    assert all(f"{where}.servers[].{key}" in errors[f"{where}.{key}"].do for key in server)


@pytest.mark.req("RES-05")
@pytest.mark.scenario("Legacy stop-neutral config keys fail fast")
@pytest.mark.parametrize("key", ["stop_neutral", "stop_neutral_ce", "mask_im_end"])
def test_stop_neutral_keys_fail_fast(key: str) -> None:
    assert "always supervised" in refused(f"stage2_ab.channel_b.{key}", True).do


@pytest.mark.req("RES-06")
def test_every_key_of_channel_b_is_told_at_once() -> None:
    section = {"mode": "async", "async": {"queue_limit": 8}, "stop_neutral": {"enabled": True}}
    assert list(errors_of(changed("stage2_ab.channel_b", section))) == [
        "stage2_ab.channel_b.mode",
        "stage2_ab.channel_b.async",
        "stage2_ab.channel_b.stop_neutral",
    ]


@pytest.mark.req("RES-06", "CFG-03")
@pytest.mark.scenario(
    "stage2_ab.schedule.pattern fails fast",
    "Legacy rollout_buffer config fails fast",
    "Removed Channel-B semantic-desc gate key fails fast",
    "Removed Channel-B reordered-gt key fails fast",
    "Removed Channel-B desc-ce-weight key fails fast",
    "rollout_generate_batch_size fails fast when present",
    "rollout_infer_batch_size fails fast when present",
    "post_rollout_pack_scope fails fast when present",
    "rollout_buffer fails fast when present",
)
@pytest.mark.parametrize(
    ("key", "replacement"),
    [
        ("stage2_ab.channel_b.reordered_gt_sft", "appended"),
        ("stage2_ab.channel_b.desc_ce_weight_matched", "never supervised"),
        ("stage2_ab.channel_b.semantic_desc_gate", "never supervised"),
        ("stage2_ab.channel_b.mode", "step mode"),
        ("stage2_ab.channel_b.async", "rollout_matching.async_rollout"),
        ("stage2_ab.channel_b.rollouts_per_step", "training.effective_batch_size"),
        ("stage2_ab.channel_b.enable_pipeline", "overlap"),
        ("stage2_ab.channel_b.rollout_decode_batch_size", "rollout_matching.decode_batch_size"),
        ("stage2_ab.schedule.pattern", "stage2_ab.schedule.b_ratio"),
        ("rollout_matching.rollout_buffer", "fresh rollouts"),
        ("rollout_matching.post_rollout_pack_scope", "Remove it"),
        ("rollout_matching.rollout_generate_batch_size", "rollout_matching.decode_batch_size"),
        ("rollout_matching.rollout_infer_batch_size", "rollout_matching.decode_batch_size"),
        ("rollout_matching.temperature", "rollout_matching.decoding.temperature"),
        ("rollout_matching.top_p", "rollout_matching.decoding.top_p"),
        ("rollout_matching.top_k", "rollout_matching.decoding.top_k"),
    ],
)
def test_a_removed_knob_says_what_replaces_it(key: str, replacement: str) -> None:
    assert replacement in refused(key, ["A", "B"]).do


@pytest.mark.req("CFG-03")
@pytest.mark.parametrize(
    "knob",
    [
        "desc_ce_weight",
        "fmt_struct_ce_weight",
        "bbox_smoothl1_weight",
        "bbox_ciou_weight",
        "coord_ce_weight",
        "coord_el1_weight",
        "coord_ehuber_weight",
        "coord_entropy_weight",
        "coord_gate_weight",
        "text_gate_weight",
    ],
)
def test_a_flat_objective_knob_fails_fast(knob: str) -> None:
    do = refused(f"stage2_ab.{knob}", 1.0).do
    assert any(module in do for module in ("token_ce", "bbox_geo", "coord_reg"))


@pytest.mark.req("CFG-03")
@pytest.mark.parametrize("base", [WARMUP, ALIGNED], ids=["two-channel", "rollout-aligned"])
def test_the_old_coordinate_loss_section_fails_fast(base: dict[str, Any]) -> None:
    error = only_error(changed("custom.coord_soft_ce_w1.soft_ce_weight", 0.1, base))
    assert error.where == "custom.coord_soft_ce_w1"
    assert "coord_reg" in error.do


@pytest.mark.req("RES-13")
@pytest.mark.scenario("custom.coord_loss does not hard error")
@pytest.mark.parametrize("value", [None, 1, {"weight": 1.0}])
def test_custom_coord_loss_is_ignored_in_silence(value: Any) -> None:
    assert parse_config(changed("custom.coord_loss", value)) == parse_config(WARMUP)
