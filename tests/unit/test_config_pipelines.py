"""Declared pipelines, in the place of either trainer variant (CFG-08)."""

import copy
from typing import Any

import pytest

from learner.config import parse_config
from learner.objectives.token_ce import TokenCEModule
from tests.unit.config_faults import BY_PIPELINE, changed, errors_of, only_error, without

MODULE_KEYS = {
    "token_ce": [
        "desc_ce_weight",
        "rollout_fn_desc_weight",
        "rollout_matched_prefix_struct_weight",
        "self_context_struct_ce_weight",
    ],
    "bbox_geo": ["smoothl1_weight", "ciou_weight"],
    "coord_reg": [
        "coord_ce_weight",
        "soft_ce_weight",
        "w1_weight",
        "coord_gate_weight",
        "text_gate_weight",
        "temperature",
        "target_sigma",
        "target_truncate",
    ],
}
MODULES = {
    name: {
        "name": name,
        "enabled": True,
        "weight": 1.0,
        "channels": ["A", "B"],
        "config": dict.fromkeys(keys, 1),
    }
    for name, keys in MODULE_KEYS.items()
}
TOKEN_CE, BBOX_GEO, COORD_REG = 0, 1, 2
MULTIPLIER = "rollout_drop_invalid_struct_ce_multiplier"
COORD_DIAG = {"name": "coord_diag", "enabled": True, "weight": 1, "channels": ["B"], "config": {}}


class Declared:
    """A config whose pipeline has all three loss modules.

    path: of the pipeline.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.objective = f"{path}.objective"
        modules = copy.deepcopy(list(MODULES.values()))
        self.mapping = changed(self.objective, modules, BY_PIPELINE[path])

    def changed(self, key: str, value: Any) -> dict[str, Any]:
        return changed(f"{self.path}.{key}", value, self.mapping)

    def without(self, key: str) -> dict[str, Any]:
        return without(f"{self.path}.{key}", self.mapping)


@pytest.fixture(params=list(BY_PIPELINE))
def declared(request: pytest.FixtureRequest) -> Declared:
    return Declared(request.param)


@pytest.mark.req("CFG-08", "RES-10")
def test_the_declared_pipeline_is_the_objective(declared: Declared) -> None:
    config = parse_config(declared.mapping)
    assert config.pipeline_path == declared.path
    assert [module.name for module in config.pipeline.objective] == list(MODULE_KEYS)


@pytest.mark.req("CFG-08")
@pytest.mark.parametrize("part", ["objective", "diagnostics"])
def test_a_pipeline_states_both_its_lists(declared: Declared, part: str) -> None:
    assert only_error(declared.without(part)).where == f"{declared.path}.{part}"


@pytest.mark.req("CFG-08")
def test_an_empty_objective_is_refused(declared: Declared) -> None:
    assert only_error(declared.changed("objective", [])).where == declared.objective


@pytest.mark.req("CFG-08", "RES-09")
@pytest.mark.parametrize("module", [TOKEN_CE, BBOX_GEO, COORD_REG])
def test_a_module_config_has_no_implicit_defaults(declared: Declared, module: int) -> None:
    emptied = errors_of(declared.changed(f"objective.{module}.config", {}))
    assert list(emptied) == [
        f"{declared.objective}[{module}].config.{key}" for key in list(MODULE_KEYS.values())[module]
    ]
    assert all("missing" in error.found for error in emptied.values())


@pytest.mark.req("CFG-08")
@pytest.mark.parametrize("module", [TOKEN_CE, BBOX_GEO, COORD_REG])
def test_a_module_config_has_no_other_keys(declared: Declared, module: int) -> None:
    own = list(MODULE_KEYS.values())[module]
    for key in {key for keys in MODULE_KEYS.values() for key in keys} - set(own):
        error = only_error(declared.changed(f"objective.{module}.config.{key}", 1.0))
        where = f"{declared.objective}[{module}].config.{key}"
        assert (error.where, error.found) == (where, "unknown key")


@pytest.mark.req("CFG-08")
@pytest.mark.parametrize("key", ["name", "enabled", "weight", "channels", "config"])
def test_an_entry_states_all_its_keys(declared: Declared, key: str) -> None:
    error = only_error(declared.without(f"objective.1.{key}"))
    assert error.where == f"{declared.objective}[1].{key}"


@pytest.mark.req("CFG-08", "CFG-03")
@pytest.mark.parametrize(
    ("module", "alias", "canonical"),
    [
        (BBOX_GEO, "bbox_smoothl1_weight", "smoothl1_weight"),
        (BBOX_GEO, "bbox_ciou_weight", "ciou_weight"),
        (COORD_REG, "coord_soft_ce_weight", "soft_ce_weight"),
        (COORD_REG, "coord_w1_weight", "w1_weight"),
    ],
)
def test_an_alias_names_the_canonical_key(
    declared: Declared, module: int, alias: str, canonical: str
) -> None:
    error = only_error(declared.changed(f"objective.{module}.config.{alias}", 1.0))
    assert error.where == f"{declared.objective}[{module}].config.{alias}"
    assert error.do == f"Write {canonical}"


@pytest.mark.req("CFG-08", "LOSS-03")
@pytest.mark.parametrize("name", ["giou", "coord_diag"])
def test_an_unknown_module_names_the_known_ones(declared: Declared, name: str) -> None:
    error = only_error(declared.changed("objective.0.name", name))
    assert error.where == f"{declared.objective}[0].name"
    assert all(known in error.do for known in MODULE_KEYS)


@pytest.mark.req("CFG-08")
def test_a_module_is_listed_once(declared: Declared) -> None:
    modules = [*MODULES.values(), MODULES["token_ce"]]
    error = only_error(declared.changed("objective", modules))
    assert error.where == f"{declared.objective}[3].name"


@pytest.mark.req("CFG-08")
@pytest.mark.parametrize("channels", [["C"], "A", ["A", "A"], None])
def test_channels_are_a_subset_of_a_and_b(declared: Declared, channels: Any) -> None:
    error = only_error(declared.changed("objective.0.channels", channels))
    assert error.where.startswith(f"{declared.objective}[0].channels")


@pytest.mark.req("RES-15")
@pytest.mark.scenario("Out-of-range struct CE multiplier is handled safely")
@pytest.mark.parametrize("multiplier", [0.0, 0.999, 4.001, -1, float("inf")])
def test_a_struct_ce_multiplier_out_of_range_fails_fast(
    declared: Declared, multiplier: float
) -> None:
    error = only_error(declared.changed(f"objective.0.config.{MULTIPLIER}", multiplier))
    assert error.where == f"{declared.objective}[0].config.{MULTIPLIER}"


@pytest.mark.req("RES-15", "CFG-08")
def test_the_struct_ce_multiplier_is_the_one_optional_key(declared: Declared) -> None:
    assert multiplier_of(declared.mapping) == 1.0
    assert multiplier_of(declared.changed(f"objective.0.config.{MULTIPLIER}", 4)) == 4.0


def multiplier_of(mapping: dict[str, Any]) -> float:
    module = parse_config(mapping).pipeline.objective[TOKEN_CE]
    assert isinstance(module, TokenCEModule)
    return module.config.rollout_drop_invalid_struct_ce_multiplier


@pytest.mark.req("LOSS-04", "CFG-08")
@pytest.mark.parametrize("silence", [{"channels": ["A"]}, {"enabled": False}])
def test_a_text_gate_without_supervised_text_is_refused(
    declared: Declared, silence: dict[str, Any]
) -> None:
    mapping = declared.changed("objective.0", MODULES["token_ce"] | silence)
    error = errors_of(mapping)[f"{declared.objective}[2].config.text_gate_weight"]
    assert "no token_ce supervises text" in error.found
    without_gate = changed(f"{declared.objective}.2.config.text_gate_weight", 0, mapping)
    gated = declared.changed("objective.2.enabled", False)
    for allowed in (changed(f"{declared.objective}.0", MODULES["token_ce"], without_gate), gated):
        parse_config(allowed)


@pytest.mark.req("CFG-08")
def test_a_channel_that_runs_has_something_to_learn_from(declared: Declared) -> None:
    """Channel A alone runs in the warm-up, channel B alone in the rollout-aligned variant."""
    running, idle = ("A", "B") if declared.path == "stage2_ab.pipeline" else ("B", "A")
    for idling in ({"channels": [idle]}, {"weight": 0}, {"enabled": False}):
        modules = [module | idling for module in copy.deepcopy(list(MODULES.values()))]
        error = errors_of(declared.changed("objective", modules))[declared.objective]
        assert f"channel {running} runs" in error.found
        assert f"Add {running} " in error.do


# --- Diagnostics ------------------------------------------------------------------------


@pytest.mark.req("CFG-08", "LOSS-06")
def test_coordinate_diagnostics_have_no_keys_of_their_own(declared: Declared) -> None:
    (module,) = parse_config(declared.changed("diagnostics", [COORD_DIAG])).pipeline.diagnostics
    assert (module.name, module.enabled, module.channels) == ("coord_diag", True, ("B",))
    written: list[Any] = [None, [], {"top_k": 5}]
    for config in written:
        entry = COORD_DIAG | {"config": config}
        (where,) = errors_of(declared.changed("diagnostics", [entry]))
        assert where.startswith(f"{declared.path}.diagnostics[0].config")


@pytest.mark.req("CFG-08")
@pytest.mark.parametrize("key", ["name", "enabled", "weight", "channels", "config"])
def test_a_diagnostics_entry_states_all_its_keys(declared: Declared, key: str) -> None:
    entry = {k: v for k, v in COORD_DIAG.items() if k != key}
    error = only_error(declared.changed("diagnostics", [entry]))
    assert error.where == f"{declared.path}.diagnostics[0].{key}"


@pytest.mark.req("CFG-08")
def test_an_unknown_or_repeated_diagnostics_module_is_refused(declared: Declared) -> None:
    other = only_error(declared.changed("diagnostics", [COORD_DIAG | {"name": "other"}]))
    assert other.where == f"{declared.path}.diagnostics[0].name"
    assert "coord_diag" in other.do
    twice = only_error(declared.changed("diagnostics", [COORD_DIAG, COORD_DIAG]))
    assert twice.where == f"{declared.path}.diagnostics[1].name"


@pytest.mark.req("CFG-08")
def test_every_repeated_module_is_told(declared: Declared) -> None:
    modules = [*MODULES.values(), MODULES["token_ce"], MODULES["coord_reg"]]
    assert list(errors_of(declared.changed("objective", modules))) == [
        f"{declared.objective}[3].name",
        f"{declared.objective}[4].name",
    ]


@pytest.mark.req("CFG-08")
@pytest.mark.parametrize("path", BY_PIPELINE)
def test_a_module_that_would_run_in_no_channel_is_refused(path: str) -> None:
    declared = Declared(path)
    error = only_error(declared.changed(f"objective.{BBOX_GEO}.channels", []))
    assert error.where == f"{path}.objective[{BBOX_GEO}].channels"
    assert "enabled" in error.do
    parse_config(declared.changed(f"objective.{BBOX_GEO}.weight", 0.0))


@pytest.mark.req("CFG-08")
@pytest.mark.parametrize("path", BY_PIPELINE)
def test_an_objective_whose_every_term_weighs_nothing_is_refused(path: str) -> None:
    modules: list[dict[str, Any]] = [dict(MODULES["bbox_geo"]), dict(MODULES["coord_reg"])]
    modules[0]["config"] = {"smoothl1_weight": 0.0, "ciou_weight": 0.0}
    modules[1]["config"] = modules[1]["config"] | {
        key: 0.0 for key in MODULE_KEYS["coord_reg"] if "_weight" in key
    }
    declared = Declared(path)
    nothing = changed(declared.objective, modules, declared.mapping)
    assert set(errors_of(nothing)) == {declared.objective}
    modules[1]["config"]["w1_weight"] = 0.1
    parse_config(changed(declared.objective, modules, declared.mapping))


@pytest.mark.req("CHA-01", "CFG-08")
def test_forwards_that_no_module_learns_from_are_refused() -> None:
    text_alone: dict[str, Any] = copy.deepcopy(MODULES["token_ce"])
    text_alone["config"]["self_context_struct_ce_weight"] = 0.0
    mapping = changed("stage2_ab.pipeline.objective", [text_alone])
    parse_config(mapping)
    several = changed("stage2_ab.n_softctx_iter", 3, mapping)
    assert only_error(several).where == "stage2_ab.n_softctx_iter"
    key = "stage2_ab.pipeline.objective.0.config.self_context_struct_ce_weight"
    parse_config(changed(key, 0.1, several))
