"""Config files: YAML, `extends`, canonical profiles, the shipped ones, the resolved one."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config import dump_mapping, dump_resolved, load_config, load_mapping, merge
from learner.config.profiles import EXPLICIT_LEAF_FIELDS, is_canonical_leaf
from learner.config.stage2_ab import PipelineConfig
from learner.config.yaml12 import read_mapping
from shared_contracts.errors import ContractError, ContractErrors

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(
    path for folder in ("demo", "stage2_two_channel") for path in (CONFIGS / folder).rglob("*.yaml")
)
LEAVES = [path for path in SHIPPED if is_canonical_leaf(path)]


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def error_of(path: Path) -> ContractError:
    with pytest.raises(ContractError) as caught:
        load_mapping(path)
    return caught.value


# --- YAML -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("1e-4", 1e-4),
        ("2.0E+3", 2000.0),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("12:30", "12:30"),
        ("2026-11-20", "2026-11-20"),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: Any) -> None:
    read = read_mapping(written(tmp_path / "a.yaml", f"key: {text}\n"))["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", 3, ""),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", 4, "twice"),
        ("a: 1\n2: 3\n", 2, "not a string"),
        ("a: 1\na: !!python/object:os.system x\n", 2, ""),
        ("a: &x {b: *x}\n", 1, ""),
        ("a: 1\n---\nb: 2\n", 2, "document"),
        ("a: 1\n\tb: 2\n", 2, ""),
    ],
)
def test_bad_yaml_names_the_file_and_the_line(
    tmp_path: Path, text: str, line: int, word: str
) -> None:
    path = written(tmp_path / "bad.yaml", text)
    error = error_of(path)
    assert error.where.startswith(f"{path}:{line}:")
    assert word in error.found


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "word\n"])
def test_a_file_without_a_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "odd.yaml", text)
    assert error_of(path).where == str(path)


def test_a_file_that_cannot_be_read_is_a_plain_error(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "missing.yaml").found
    assert error_of(tmp_path).where == str(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in error_of(binary).found
    assert error_of(written(tmp_path / "nul.yaml", "a: \x00\n")).where.endswith("nul.yaml")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), values, min_size=1))
def test_what_is_dumped_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, mapping: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_bytes(dump_mapping(mapping).encode())
    assert read_mapping(path) == mapping


@given(
    st.sampled_from(["no", "1e-4", "0o17", "12:30", "null", "~", "true", "=", "<<", "2026-01-01"])
)
def test_text_that_looks_like_another_scalar_is_quoted(text: str) -> None:
    assert dump_mapping({"key": text}) == f"key: '{text}'\n"


# --- extends ----------------------------------------------------------------------------


@pytest.mark.req("CFG-04")
def test_extends_merges_mappings_and_replaces_lists_whole(tmp_path: Path) -> None:
    written(tmp_path / "base.yaml", "a: {b: 1, c: {d: 2, e: 3}}\nlist: [1, 2, 3]\nkept: 1\n")
    written(tmp_path / "mid.yaml", "extends: base.yaml\na: {c: {e: 4}}\n")
    leaf = written(tmp_path / "sub" / "leaf.yaml", "extends: ../mid.yaml\na: {b: x}\nlist: [9]\n")
    assert load_mapping(leaf) == {
        "a": {"b": "x", "c": {"d": 2, "e": 4}},
        "list": [9],
        "kept": 1,
    }


@pytest.mark.req("CFG-04")
def test_a_circle_of_extends_names_the_chain(tmp_path: Path) -> None:
    first = written(tmp_path / "a.yaml", "extends: b.yaml\n")
    second = written(tmp_path / "b.yaml", "extends: a.yaml\n")
    error = error_of(first)
    assert error.where == f"{second}: extends"
    assert "a.yaml -> " in error.found


@pytest.mark.req("CFG-04")
@pytest.mark.parametrize("extends", ["[a.yaml, b.yaml]", "[]", "3", "", "{a: 1}"])
def test_extends_names_one_file(tmp_path: Path, extends: str) -> None:
    path = written(tmp_path / "leaf.yaml", f"extends: {extends}\n")
    assert error_of(path).where == f"{path}: extends"


@pytest.mark.req("CFG-04")
def test_a_missing_base_is_told_with_the_file_that_names_it(tmp_path: Path) -> None:
    path = written(tmp_path / "leaf.yaml", "extends: gone.yaml\n")
    error = error_of(path)
    assert error.where == f"{path}: extends"
    assert "gone.yaml" in error.found


def test_merging_changes_neither_mapping() -> None:
    low, high = {"a": {"b": 1}, "c": [1]}, {"a": {"d": 2}, "c": [2]}
    assert merge(low, high) == {"a": {"b": 1, "d": 2}, "c": [2]}
    assert (low, high) == ({"a": {"b": 1}, "c": [1]}, {"a": {"d": 2}, "c": [2]})
    assert merge({"a": {"b": 1}}, {"a": None}) == {"a": None}


# --- Canonical profiles -----------------------------------------------------------------


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """A copy of the shipped profiles, to break."""
    root = tmp_path / "stage2_two_channel"
    for path in (CONFIGS / "stage2_two_channel").rglob("*.yaml"):
        copy = root / path.relative_to(CONFIGS / "stage2_two_channel")
        written(copy, path.read_text(encoding="utf-8"))
    return root


@pytest.mark.req("CFG-04")
@pytest.mark.parametrize("folder", ["prod", "smoke"])
def test_a_one_hop_leaf_with_its_explicit_fields_loads(profiles: Path, folder: str) -> None:
    assert load_config(profiles / folder / "default.yaml").training.run_name.endswith(folder)


@pytest.mark.req("CFG-04")
@pytest.mark.parametrize("folder", ["prod", "smoke"])
@pytest.mark.parametrize("field", EXPLICIT_LEAF_FIELDS)
def test_a_leaf_states_each_high_signal_field_itself(
    profiles: Path, folder: str, field: str
) -> None:
    path = profiles / folder / "default.yaml"
    leaf = read_mapping(path)
    *parents, last = field.split(".")
    here: Any = leaf
    for key in parents:
        here = here[key]
    del here[last]
    path.write_text(dump_mapping(leaf), encoding="utf-8")
    with pytest.raises(ContractErrors) as caught:
        load_config(path)
    (error,) = caught.value.errors
    assert error.where == field
    assert str(path) in error.do
    assert "base.yaml" in error.found


@pytest.mark.req("CFG-04")
def test_all_missing_leaf_fields_are_told_at_once(profiles: Path) -> None:
    path = written(profiles / "prod" / "bare.yaml", "extends: ../base.yaml\n")
    with pytest.raises(ContractErrors) as caught:
        load_config(path)
    assert tuple(error.where for error in caught.value.errors) == EXPLICIT_LEAF_FIELDS
    assert len(EXPLICIT_LEAF_FIELDS) == 14


@pytest.mark.req("CFG-04")
def test_a_second_hop_names_the_chain_and_the_base(profiles: Path) -> None:
    leaf = read_mapping(profiles / "smoke" / "default.yaml")
    written(profiles / "smoke" / "mid.yaml", dump_mapping(leaf))
    path = written(profiles / "smoke" / "leaf.yaml", dump_mapping(leaf | {"extends": "mid.yaml"}))
    with pytest.raises(ContractErrors) as caught:
        load_config(path)
    (error,) = caught.value.errors
    assert error.where == f"{path}: extends"
    assert "leaf.yaml -> " in error.found
    assert "mid.yaml -> " in error.found
    assert "../base.yaml" in error.do


@pytest.mark.req("CFG-04")
def test_a_base_that_extends_something_is_a_second_hop(profiles: Path) -> None:
    written(profiles / "root.yaml", "data: {shuffle: true}\n")
    base = profiles / "base.yaml"
    written(base, f"extends: root.yaml\n{base.read_text(encoding='utf-8')}")
    with pytest.raises(ContractErrors) as caught:
        load_config(profiles / "prod" / "default.yaml")
    assert "root.yaml" in caught.value.errors[0].found


@pytest.mark.req("CFG-04")
@pytest.mark.parametrize("extends", [None, ["../base.yaml", "../prod/default.yaml"]])
def test_a_leaf_has_exactly_one_parent(profiles: Path, extends: Any) -> None:
    leaf = read_mapping(profiles / "smoke" / "default.yaml")
    del leaf["extends"]
    path = profiles / "smoke" / "odd.yaml"
    written(path, dump_mapping(leaf if extends is None else leaf | {"extends": extends}))
    assert error_of(path).where == f"{path}: extends"


@pytest.mark.req("CFG-04")
def test_only_prod_and_smoke_hold_canonical_leaves(profiles: Path) -> None:
    assert is_canonical_leaf(profiles / "prod" / "x.yaml")
    assert is_canonical_leaf(profiles / "smoke" / "x.yaml")
    assert not is_canonical_leaf(profiles / "base.yaml")
    assert not is_canonical_leaf(profiles / "other" / "x.yaml")
    assert not is_canonical_leaf(profiles.parent / "demo" / "prod" / "x.yaml")


# --- Shipped files ----------------------------------------------------------------------


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(CONFIGS)) for path in paths]


@pytest.mark.req("CFG-04")
def test_the_shipped_configs_are_these() -> None:
    assert set(names(SHIPPED)) >= {
        "demo/two_channel.yaml",
        "demo/warmup.yaml",
        "stage2_two_channel/base.yaml",
        "stage2_two_channel/prod/default.yaml",
        "stage2_two_channel/smoke/default.yaml",
    }
    assert {path.parent.name for path in LEAVES} == {"prod", "smoke"}


@pytest.mark.req("CFG-04")
@pytest.mark.parametrize("path", SHIPPED, ids=names(SHIPPED))
def test_every_shipped_config_loads_and_its_resolved_form_loads_equal(
    path: Path, tmp_path: Path
) -> None:
    config = load_config(path)
    resolved = written(tmp_path / "resolved_config.yaml", dump_resolved(config))
    assert load_config(resolved) == config
    assert "extends" not in read_mapping(resolved)


def weights_of(pipeline: PipelineConfig) -> dict[str, Any]:
    return {
        key: value
        for module in pipeline.objective
        if module.name != "token_ce"
        for key, value in module.config.model_dump().items()
    }


@pytest.mark.req("CFG-04")
@pytest.mark.parametrize("path", ["base.yaml", "smoke/default.yaml"])
def test_base_and_smoke_have_the_base_weights(path: str) -> None:
    weights = weights_of(load_config(CONFIGS / "stage2_two_channel" / path).stage2_ab.pipeline)
    assert weights["smoothl1_weight"] == 2.0
    assert weights["ciou_weight"] == 0.5
    assert weights["coord_ce_weight"] == 0.0
    assert weights["soft_ce_weight"] == 0.02
    assert weights["w1_weight"] == 0.02


@pytest.mark.req("CFG-04")
def test_prod_states_its_weights_itself() -> None:
    path = CONFIGS / "stage2_two_channel/prod/default.yaml"
    assert "pipeline" in read_mapping(path)["stage2_ab"]
    weights = weights_of(load_config(path).stage2_ab.pipeline)
    assert weights["smoothl1_weight"] == 2.0
    assert weights["ciou_weight"] == 0.2
    assert weights["coord_ce_weight"] == 0.02
    assert weights["soft_ce_weight"] == 0.1
    assert weights["w1_weight"] == 0.1
    assert weights["target_truncate"] == 8


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
    assert load_config(CONFIGS / "demo/warmup.yaml").stage2_ab.schedule.b_ratio == 0
    ratio = load_config(CONFIGS / "demo/two_channel.yaml").stage2_ab.schedule.b_ratio
    assert 0 < ratio < 1
