"""Canonical profiles, and the files that are shipped (CFG-04)."""

from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, dump_resolved, load_config, load_mapping, merge
from learner.config.load import EXPLICIT_LEAF_FIELDS, LEAF_FIELDS, is_canonical_leaf
from learner.config.yaml12 import read_mapping
from learner.objectives.config import PipelineConfig
from learner.objectives.token_ce import TokenCEConfig
from shared_contracts.errors import ContractError
from tests.unit.config_faults import CONFIGS

SHIPPED = sorted(CONFIGS.rglob("*.yaml"))
LEAVES = [path for path in SHIPPED if is_canonical_leaf(path)]
TWO_CHANNEL = CONFIGS / "stage2_two_channel"
FOLDERS = ("prod", "smoke")


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def faults_of(path: Path) -> list[ContractError]:
    with pytest.raises(ContractError) as caught:
        load_config(path)
    error = caught.value
    return error.errors


@pytest.fixture(params=list(LEAF_FIELDS))
def profiles(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one variant's shipped profiles, to break."""
    for path in (CONFIGS / request.param).rglob("*.yaml"):
        written(tmp_path / path.relative_to(CONFIGS), path.read_text(encoding="utf-8"))
    copy: Path = tmp_path / request.param
    return copy


@pytest.mark.req("CFG-04")
@pytest.mark.scenario("One-hop profile inheritance passes validation")
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_one_hop_leaf_with_its_explicit_fields_loads(profiles: Path, folder: str) -> None:
    config = load_config(profiles / folder / "default.yaml")
    assert config.training.run_name.endswith(folder)
    assert config.custom.trainer_variant == profiles.name


@pytest.mark.req("CFG-04", "MET-03")
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_run_folder_of_a_leaf_is_no_leaf(profiles: Path, tmp_path: Path, folder: str) -> None:
    config = load_config(profiles / folder / "default.yaml")
    run = tmp_path / config.training.output_dir.relative_to(Path.cwd())
    assert run.parts[-2:] == (profiles.name, folder)
    resolved = written(run / "resolved_config.yaml", dump_resolved(config))
    assert load_config(resolved) == config


@pytest.mark.req("CFG-04")
def test_runs_that_extend_a_base_do_not_share_its_folders(profiles: Path) -> None:
    own = {"extends": str(profiles / "base.yaml"), "training": {"output_dir": "/runs/own"}}
    config = load_config(written(profiles / "own.yaml", dump_mapping(own)))
    assert config.training.logging_dir == Path("/runs/own/tensorboard")


@pytest.mark.req("CFG-04")
@pytest.mark.scenario(
    "Missing explicit run identity fails fast", "Missing explicit model path fails fast"
)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_leaf_states_each_high_signal_field_itself(profiles: Path, folder: str) -> None:
    path = profiles / folder / "default.yaml"
    shipped = path.read_text(encoding="utf-8")
    for field in LEAF_FIELDS[profiles.name]:
        leaf = read_mapping(written(path, shipped))
        *parents, last = field.split(".")
        here: Any = leaf
        for key in parents:
            here = here[key]
        del here[last]
        (error,) = faults_of(written(path, dump_mapping(leaf)))
        assert error.where == field
        assert str(path) in error.do
        assert "base.yaml" in error.found


@pytest.mark.req("CFG-04")
@pytest.mark.parametrize("key", ["logging_dir", "vit_lr", "aligner_lr"])
def test_null_states_nothing_where_it_means_derived(profiles: Path, key: str) -> None:
    path = profiles / "prod" / "default.yaml"
    leaf = merge(read_mapping(path), {"training": {key: None}})
    (error,) = faults_of(written(path, dump_mapping(leaf)))
    assert (error.where, "null" in error.do) == (f"training.{key}", True)


@pytest.mark.req("CFG-04")
def test_all_missing_leaf_fields_are_told_at_once(profiles: Path) -> None:
    path = written(profiles / "prod" / "bare.yaml", "extends: ../base.yaml\n")
    assert tuple(error.where for error in faults_of(path)) == LEAF_FIELDS[profiles.name]


@pytest.mark.req("CFG-04")
def test_the_explicit_fields_are_fourteen_and_without_channel_a_two_fewer() -> None:
    assert LEAF_FIELDS["stage2_two_channel"] == EXPLICIT_LEAF_FIELDS
    assert len(EXPLICIT_LEAF_FIELDS) == 14
    assert set(EXPLICIT_LEAF_FIELDS) - set(LEAF_FIELDS["stage2_rollout_aligned"]) == {
        "stage2_ab.schedule.b_ratio",
        "stage2_ab.n_softctx_iter",
    }


@pytest.mark.req("CFG-04")
@pytest.mark.scenario("Multi-hop profile inheritance fails fast")
def test_a_second_hop_names_the_chain_and_the_base(profiles: Path) -> None:
    leaf = read_mapping(profiles / "smoke" / "default.yaml")
    written(profiles / "smoke" / "mid.yaml", dump_mapping(leaf))
    path = written(profiles / "smoke" / "leaf.yaml", dump_mapping(leaf | {"extends": "mid.yaml"}))
    (error,) = faults_of(path)
    assert error.where == f"{path}: extends"
    assert "leaf.yaml -> " in error.found
    assert "mid.yaml -> " in error.found
    assert "../base.yaml" in error.do


@pytest.mark.req("CFG-04")
def test_a_base_that_extends_something_is_a_second_hop(profiles: Path) -> None:
    written(profiles / "root.yaml", "data: {shuffle: true}\n")
    base = profiles / "base.yaml"
    written(base, f"extends: root.yaml\n{base.read_text(encoding='utf-8')}")
    (error,) = faults_of(profiles / "prod" / "default.yaml")
    assert "root.yaml" in error.found


@pytest.mark.req("CFG-04")
@pytest.mark.scenario("Dual-parent smoke inheritance fails fast")
@pytest.mark.parametrize("extends", [None, ["../base.yaml", "../prod/default.yaml"]])
def test_a_leaf_has_exactly_one_parent(profiles: Path, extends: Any) -> None:
    leaf = read_mapping(profiles / "smoke" / "default.yaml")
    del leaf["extends"]
    path = profiles / "smoke" / "odd.yaml"
    written(path, dump_mapping(leaf if extends is None else leaf | {"extends": extends}))
    assert f"{path}: extends" in [error.where for error in faults_of(path)]


@pytest.mark.req("CFG-04")
@pytest.mark.scenario("Canonical profile discovery is scoped to prod/smoke")
def test_only_prod_and_smoke_hold_canonical_leaves(profiles: Path) -> None:
    assert is_canonical_leaf(profiles / "prod" / "x.yaml")
    assert is_canonical_leaf(profiles / "smoke" / "x.yaml")
    assert not is_canonical_leaf(profiles / "base.yaml")
    assert not is_canonical_leaf(profiles / "other" / "x.yaml")
    assert not is_canonical_leaf(profiles / "prod" / "old" / "x.yaml")
    assert not is_canonical_leaf(profiles.parent / "demo" / "prod" / "x.yaml")


@pytest.mark.req("CFG-04")
def test_a_leaf_is_known_however_its_path_is_written(
    profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(profiles / "prod" / "bare.yaml", "extends: ../base.yaml\n")
    monkeypatch.chdir(profiles / "smoke")
    for path in ("../prod/bare.yaml", profiles / "smoke" / ".." / "prod" / "bare.yaml"):
        assert faults_of(Path(path))[0].where == "model.model"


# --- Shipped files ----------------------------------------------------------------------


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(CONFIGS)) for path in paths]


DEMO = ("demo/channel_a.yaml", "demo/two_channel.yaml", "demo/warmup.yaml")


@pytest.mark.req("CFG-04")
def test_the_shipped_configs_are_these() -> None:
    profiles = [
        f"{variant}/{name}"
        for variant in LEAF_FIELDS
        for name in ("base.yaml", "prod/default.yaml", "smoke/default.yaml")
    ]
    assert set(names(SHIPPED)) >= {*DEMO, *profiles}
    assert set(names(LEAVES)) >= {name for name in profiles if "default" in name}
    in_folders = (CONFIGS / variant / folder for variant in LEAF_FIELDS for folder in FOLDERS)
    assert set(LEAVES) == {path for folder in in_folders for path in folder.glob("*.yaml")}


@pytest.mark.req("CFG-04", "CFG-02", "CFG-09")
@pytest.mark.scenario(
    "sft injection contract remains stable", "Runtime rollout injection path stays stable"
)
@pytest.mark.parametrize("path", SHIPPED, ids=names(SHIPPED))
def test_every_shipped_config_loads_and_its_resolved_form_loads_equal(
    path: Path, tmp_path: Path
) -> None:
    config = load_config(path)
    resolved = written(tmp_path / "resolved_config.yaml", dump_resolved(config))
    assert load_config(resolved) == config
    assert "extends" not in read_mapping(resolved)


@pytest.mark.req("CFG-04", "RES-02")
@pytest.mark.parametrize("path", [p for p in SHIPPED if p.parts[len(CONFIGS.parts)] != "demo"])
def test_a_profile_is_of_the_variant_its_folder_is_named_after(path: Path) -> None:
    assert load_config(path).custom.trainer_variant == path.parts[len(CONFIGS.parts)]


def pipeline_of(path: Path) -> PipelineConfig:
    return load_config(path).pipeline


def test_the_control_of_the_demo_is_its_second_run_without_channel_b() -> None:
    two, control = (
        load_config(CONFIGS / "demo" / f"{name}.yaml").model_dump()
        for name in ("two_channel", "channel_a")
    )
    assert control["stage2_ab"]["schedule"]["b_ratio"] == 0
    control["stage2_ab"]["schedule"]["b_ratio"] = two["stage2_ab"]["schedule"]["b_ratio"]
    for key in ("run_name", "output_dir", "logging_dir"):
        assert control["training"].pop(key) != two["training"].pop(key)
    assert control == two


def weights_of(pipeline: PipelineConfig) -> dict[str, Any]:
    return {
        key: value
        for module in pipeline.objective
        if module.name != "token_ce"
        for key, value in module.config.model_dump().items()
    }


def token_ce_of(pipeline: PipelineConfig) -> TokenCEConfig:
    (config,) = [m.config for m in pipeline.objective if m.name == "token_ce"]
    assert isinstance(config, TokenCEConfig)
    return config


@pytest.mark.req("CFG-04")
@pytest.mark.scenario("Canonical smoke leaves inherit base CIoU/soft-CE/W1 defaults")
@pytest.mark.parametrize("path", [TWO_CHANNEL / "base.yaml", *TWO_CHANNEL.glob("smoke/*.yaml")])
def test_base_and_smoke_have_the_base_weights(path: Path) -> None:
    assert ("pipeline" in read_mapping(path)["stage2_ab"]) == (path.name == "base.yaml")
    weights = weights_of(pipeline_of(path))
    assert weights["smoothl1_weight"] == 2.0
    assert weights["ciou_weight"] == 0.5
    assert weights["coord_ce_weight"] == 0.0
    assert weights["soft_ce_weight"] == 0.02
    assert weights["w1_weight"] == 0.02


@pytest.mark.req("CFG-04")
@pytest.mark.scenario("Canonical prod leaves pin explicit CIoU/soft-CE/W1 overrides")
@pytest.mark.parametrize("path", list(TWO_CHANNEL.glob("prod/*.yaml")))
def test_prod_states_its_weights_itself(path: Path) -> None:
    assert "objective" in read_mapping(path)["stage2_ab"]["pipeline"]
    weights = weights_of(pipeline_of(path))
    assert weights["smoothl1_weight"] == 2.0
    assert weights["ciou_weight"] == 0.2
    assert weights["coord_ce_weight"] == 0.02
    assert weights["soft_ce_weight"] == 0.1
    assert weights["w1_weight"] == 0.1
    assert weights["target_truncate"] == 8


@pytest.mark.req("FULL-06")
@pytest.mark.parametrize("family", list(LEAF_FIELDS))
def test_every_profile_for_gpus_decodes_many_sequences_at_once(family: str) -> None:
    for path in (CONFIGS / family).rglob("*.yaml"):
        assert load_config(path).rollout_matching.decode_batch_size >= 64


@pytest.mark.req("RES-09", "RES-10")
@pytest.mark.parametrize("path", list(TWO_CHANNEL.rglob("*.yaml")))
def test_two_channel_profiles_train_descriptions_and_decoded_boxes(path: Path) -> None:
    pipeline = pipeline_of(path)
    assert token_ce_of(pipeline).rollout_fn_desc_weight > 0
    (boxes,) = [module for module in pipeline.objective if module.name == "bbox_geo"]
    assert boxes.counts_in("A")
    assert boxes.counts_in("B")


@pytest.mark.req("RES-09", "RES-10")
@pytest.mark.parametrize("path", list((CONFIGS / "stage2_rollout_aligned").rglob("*.yaml")))
def test_rollout_aligned_profiles_train_distributions_of_coordinates_and_no_descriptions(
    path: Path,
) -> None:
    pipeline = pipeline_of(path)
    text = token_ce_of(pipeline)
    assert (text.rollout_fn_desc_weight, text.rollout_matched_prefix_struct_weight) == (0, 0)
    assert [module.name for module in pipeline.objective] == ["token_ce", "coord_reg"]
    assert all(module.counts_in("B") for module in pipeline.objective)
    weights = weights_of(pipeline)
    assert weights["coord_ce_weight"] == 0
    assert all(weights[f"{term}_weight"] > 0 for term in ("soft_ce", "w1", "coord_gate"))


@pytest.mark.req("CFG-05")
@pytest.mark.parametrize("variant", list(LEAF_FIELDS))
def test_a_base_writes_out_every_key_of_matching(variant: str) -> None:
    mapping = read_mapping(CONFIGS / variant / "base.yaml")["rollout_matching"]["matching"]
    config = load_config(CONFIGS / variant / "base.yaml").rollout_matching.matching
    assert mapping == config.model_dump()


def test_the_demo_fills_in_ports_and_paths(tmp_path: Path) -> None:
    overrides = {
        "model": {"model": tmp_path / "model"},
        "rollout_matching": {
            "vllm": {"server": {"servers": [{"base_url": "http://127.0.0.1:9", "group_port": 10}]}}
        },
    }
    filled = merge(load_mapping(CONFIGS / "demo/two_channel.yaml"), overrides)
    config = load_config(written(tmp_path / "run/config.yaml", dump_mapping(filled)))
    assert config.model.model == tmp_path / "model"
    section = config.rollout_matching.vllm.server
    assert section is not None
    (server,) = section.servers
    assert (server.base_url, server.group_port) == ("http://127.0.0.1:9", 10)
    assert section.timeout_s == 240.0


def test_channel_a_alone_warms_up_and_both_channels_follow() -> None:
    assert load_config(CONFIGS / "demo/warmup.yaml").b_ratio == 0
    ratio = load_config(CONFIGS / "demo/two_channel.yaml").b_ratio
    assert 0 < ratio < 1


@pytest.mark.req("CFG-04", "CFG-05")
@pytest.mark.parametrize(
    "profile",
    [path for path in SHIPPED if "demo" not in path.parts],
    ids=lambda p: "/".join(p.parts[-3:]),
)
def test_a_profile_with_servers_is_turned_to_colocate_as_its_refusal_says(
    profile: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: {profile}\nrollout_matching: {{vllm: {{mode: colocate}}}}\n")
    with pytest.raises(ContractError) as caught:
        load_config(mine)
    assert caught.value.where == "rollout_matching.vllm.server"
    assert "`server: null` beside mode: colocate" in caught.value.do
    mine.write_text(
        f"extends: {profile}\nrollout_matching:\n  vllm: {{mode: colocate, server: null}}\n"
    )
    assert load_config(mine).rollout_matching.backend == "colocate"
