"""Canonical profiles, and the shipped configs (CFG-04)."""

from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, dump_resolved, load_config
from learner.config.load import LEAF_FIELDS, canonical_variant
from learner.config.yaml12 import read_mapping
from learner.objectives.config import PipelineConfig
from shared_contracts.errors import ContractError
from tests.unit.config_faults import CONFIGS, SHIPPED, config_name, written

TWO_CHANNEL = CONFIGS / "stage2_two_channel"
FOLDERS = ("prod", "smoke")


def faults_of(path: Path) -> list[ContractError]:
    with pytest.raises(ContractError) as caught:
        load_config(path)
    return caught.value.errors


@pytest.fixture(params=list(LEAF_FIELDS))
def profiles(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the shipped profiles of one variant, to break."""
    for path in (CONFIGS / request.param).rglob("*.yaml"):
        written(tmp_path / path.relative_to(CONFIGS), path.read_text(encoding="utf-8"))
    copy: Path = tmp_path / request.param
    return copy


@pytest.mark.req("CFG-04", "RES-02", "MET-03")
@pytest.mark.scenario(
    "One-hop profile inheritance passes validation",
    "Downstream profile with explicit high-signal fields is accepted",
)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_one_hop_leaf_loads_and_so_does_its_run_folder(
    profiles: Path, tmp_path: Path, folder: str
) -> None:
    config = load_config(profiles / folder / "default.yaml")
    assert config.training.run_name.endswith(folder)
    assert config.custom.trainer_variant == profiles.name
    run = tmp_path / config.training.output_dir.relative_to(Path.cwd())
    assert run.parts[-2:] == (profiles.name, folder)
    resolved = written(run / "resolved_config.yaml", dump_resolved(config))
    assert load_config(resolved) == config


@pytest.mark.req("CFG-04")
@pytest.mark.scenario(
    "Missing explicit run identity fails fast", "Missing explicit model path fails fast"
)
def test_a_leaf_states_each_high_signal_field_itself(profiles: Path) -> None:
    path = written(profiles / "prod" / "bare.yaml", "extends: ../base.yaml\n")
    errors = faults_of(path)
    fields = LEAF_FIELDS[profiles.name]
    assert tuple(error.where for error in errors) == fields
    assert len(fields) == (14 if profiles.name == "stage2_two_channel" else 12)
    assert all("base.yaml" in error.found and str(path) in error.do for error in errors)


@pytest.mark.req("CFG-04")
@pytest.mark.scenario("Multi-hop profile inheritance fails fast")
def test_a_second_hop_is_refused_with_the_chain_and_the_base(profiles: Path) -> None:
    leaf = read_mapping(profiles / "smoke" / "default.yaml")
    written(profiles / "smoke" / "mid.yaml", dump_mapping(leaf))
    path = written(profiles / "smoke" / "leaf.yaml", dump_mapping(leaf | {"extends": "mid.yaml"}))
    (error,) = faults_of(path)
    assert error.where == f"{path}: extends"
    assert "leaf.yaml -> " in error.found
    assert "mid.yaml -> " in error.found
    assert "../base.yaml" in error.do
    base = profiles / "base.yaml"
    written(profiles / "root.yaml", "data: {shuffle: true}\n")
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
def test_only_prod_and_smoke_hold_canonical_leaves(
    profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert canonical_variant(profiles / "prod" / "x.yaml")
    assert canonical_variant(profiles / "smoke" / ".." / "prod" / "x.yaml")
    assert not canonical_variant(profiles / "base.yaml")
    assert not canonical_variant(profiles / "other" / "x.yaml")
    assert not canonical_variant(profiles / "prod" / "old" / "x.yaml")
    assert not canonical_variant(profiles.parent / "demo" / "prod" / "x.yaml")
    monkeypatch.chdir(profiles / "smoke")
    assert canonical_variant(Path("../prod/x.yaml"))


# --- Shipped files ----------------------------------------------------------------------


@pytest.mark.req("CFG-04", "CFG-02", "CFG-09")
@pytest.mark.scenario(
    "sft injection contract remains stable", "Runtime rollout injection path stays stable"
)
@pytest.mark.parametrize("path", SHIPPED, ids=config_name)
def test_every_shipped_config_loads_and_its_resolved_form_loads_equal(
    path: Path, tmp_path: Path
) -> None:
    config = load_config(path)
    resolved = written(tmp_path / "resolved_config.yaml", dump_resolved(config))
    assert load_config(resolved) == config
    assert "extends" not in read_mapping(resolved)


@pytest.mark.req("CFG-04")
@pytest.mark.parametrize("path", sorted(TWO_CHANNEL.glob("gpu/*.yaml")), ids=config_name)
def test_a_profile_of_a_gpu_is_a_canonical_leaf_but_for_its_folder(
    path: Path, tmp_path: Path
) -> None:
    """Profiles beside prod and smoke are bound to one hop and the explicit fields, too."""
    folder = tmp_path / TWO_CHANNEL.name
    written(folder / "base.yaml", (TWO_CHANNEL / "base.yaml").read_text(encoding="utf-8"))
    leaf = written(folder / "prod" / path.name, path.read_text(encoding="utf-8"))
    assert canonical_variant(leaf)
    assert load_config(leaf) == load_config(path)


def weights_of(pipeline: PipelineConfig) -> dict[str, Any]:
    return {
        key: value
        for module in pipeline.objective
        if module.name != "token_ce"
        for key, value in module.config.model_dump().items()
    }


BASE_WEIGHTS = {"ciou_weight": 0.5, "coord_ce_weight": 0, "soft_ce_weight": 0.02, "w1_weight": 0.02}
PROD_WEIGHTS = {"ciou_weight": 0.2, "coord_ce_weight": 0.02, "soft_ce_weight": 0.1}


@pytest.mark.req("CFG-04")
@pytest.mark.scenario(
    "Canonical smoke leaves inherit base CIoU/soft-CE/W1 defaults",
    "Canonical prod leaves pin explicit CIoU/soft-CE/W1 overrides",
)
@pytest.mark.parametrize(
    ("path", "own", "expected"),
    [
        ("base.yaml", True, BASE_WEIGHTS),
        ("smoke/default.yaml", False, BASE_WEIGHTS),
        ("prod/default.yaml", True, PROD_WEIGHTS | {"w1_weight": 0.1, "target_truncate": 8}),
    ],
)
def test_the_weights_of_the_two_channel_profiles(
    path: str, own: bool, expected: dict[str, float]
) -> None:
    assert ("pipeline" in read_mapping(TWO_CHANNEL / path)["stage2_ab"]) == own
    weights = weights_of(load_config(TWO_CHANNEL / path).pipeline)
    assert weights["smoothl1_weight"] == 2.0
    assert {key: weights[key] for key in expected} == expected
