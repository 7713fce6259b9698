"""`learner config show` and `check`, origins of values, advice on unknown keys (CFG-10)."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from learner.cli import app
from learner.config import dump_mapping, load_config, load_mapping, merge, parse_config
from learner.config.load import dotted, find_origins, show_config
from learner.config.yaml12 import dump_annotated, read_mapping
from learner.data.toy import ToyData
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.extends import merge_chain
from shared_contracts.yaml12 import Steps
from tests.unit.small_run import small_mapping

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))
PROFILES = ROOT / "configs" / "stage2_two_channel"
WARMUP = ROOT / "configs" / "demo" / "warmup.yaml"


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def cli(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(app, [str(word) for word in arguments], env=environment)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def line_of(path: Path, text: str) -> str:
    """`file:line` of the one line of a file that starts with this text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.lstrip(" -").startswith(text)]
    return f"{path}:{number}"


def notes(text: str) -> dict[str, str]:
    """The comment beside each key of `learner config show`; the last of equal keys."""
    beside = re.findall(r"^[ -]*(\w+):.* # (.*)$", text, re.MULTILINE)
    return dict(beside)


# --- Origins ----------------------------------------------------------------------------

keys = st.sampled_from(["a", "b", "c"])
trees = st.dictionaries(
    keys,
    st.recursive(
        st.none(),
        lambda below: st.dictionaries(keys, below) | st.lists(below, max_size=2),
        max_leaves=4,
    ),
)


def stamped(value: Any, stamp: int) -> Any:
    """The same tree with `stamp` at every leaf."""
    if isinstance(value, dict):
        return {key: stamped(item, stamp) for key, item in value.items()}
    return [stamped(item, stamp) for item in value] if isinstance(value, list) else stamp


def paths(value: Any, at: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    items = value.items() if isinstance(value, dict) else ()
    for step, item in enumerate(value) if isinstance(value, list) else items:
        yield (*at, step), item
        yield from paths(item, (*at, step))


@pytest.mark.req("CFG-10")
@given(st.lists(trees, min_size=1, max_size=3))
def test_the_origin_of_a_value_is_the_file_whose_value_it_is(files: list[dict[str, Any]]) -> None:
    mappings = [stamped(tree, number) for number, tree in enumerate(files)]
    lines = [{steps: 1 for steps, _ in paths(mapping)} for mapping in mappings]
    merged = merge_chain(mappings)
    origins = find_origins(merged, [(Path(f"{n}"), known) for n, known in enumerate(lines)])
    assert origins.keys() == {steps for steps, _ in paths(merged)}
    for steps, value in paths(merged):
        if isinstance(value, int):
            assert origins[steps][0] == f"{value}:1"


def test_a_path_is_written_with_dots_and_indices() -> None:
    assert dotted(("a", 0, 1, "b")) == "a[0][1].b"


# --- show -------------------------------------------------------------------------------


@pytest.mark.req("CFG-10")
@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_what_is_shown_loads_to_an_equal_config(path: Path, tmp_path: Path) -> None:
    shown = written(tmp_path / "shown.yaml", show_config(path))
    assert load_config(shown) == load_config(path)


@pytest.mark.req("CFG-10")
@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_every_shown_value_names_the_line_that_sets_it(path: Path) -> None:
    values = 0
    for line in show_config(path).splitlines():
        found = re.fullmatch(r"[ -]*(\w+):( .*?)? +# (?:default|derived|(.*):(\d+))", line)
        if found and found[3]:
            source = Path(found[3]).read_text(encoding="utf-8").splitlines()[int(found[4]) - 1]
            assert source.lstrip(" -").startswith(f"{found[1]}:")
        else:  # a section, or text that goes on
            assert found or re.fullmatch(r"[ -]*\w+:", line) or re.match(r"    \w", line), line
        values += found is not None
    assert values > 90


@pytest.mark.req("CFG-10")
def test_a_value_comes_from_the_leaf_the_base_a_default_or_another_key() -> None:
    leaf, base = PROFILES / "smoke" / "default.yaml", PROFILES / "base.yaml"
    beside = notes(show_config(leaf))
    assert beside["b_ratio"] == line_of(leaf, "b_ratio:")
    assert beside["warmup_ratio"] == line_of(base, "warmup_ratio:")
    assert beside["gradient_accumulation_steps"] == "default"
    beside = notes(show_config(WARMUP))
    assert beside["vit_lr"] == beside["logging_dir"] == "derived"


@pytest.mark.req("CFG-10")
def test_the_lines_that_were_overridden_are_named_on_request() -> None:
    leaf, base = PROFILES / "smoke" / "default.yaml", PROFILES / "base.yaml"
    beside = notes(show_config(leaf, all_origins=True))
    assert beside["b_ratio"] == f"{line_of(leaf, 'b_ratio:')} over {line_of(base, 'b_ratio:')}"


def test_null_for_a_derived_key_is_derived(tmp_path: Path) -> None:
    mapping = merge(load_mapping(WARMUP), {"training": {"vit_lr": None, "aligner_lr": 0.5}})
    path = written(tmp_path / "run.yaml", dump_mapping(mapping))
    beside = notes(show_config(path))
    assert beside["vit_lr"] == "derived"
    assert beside["aligner_lr"] == line_of(path, "aligner_lr:")


@pytest.mark.req("CFG-10")
def test_comments_stand_in_one_column_but_beside_long_values() -> None:
    columns = [line.index(" # ") for line in show_config(WARMUP).splitlines() if " # " in line]
    common = max(set(columns), key=columns.count)
    assert columns.count(common) > 0.9 * len(columns)
    assert all(column >= common for column in columns)


def test_long_text_is_folded_and_lines_stay_lines() -> None:
    mapping = {"long": "word " * 20 + "end", "lines": "one\ntwo", "list": ["A", 1]}
    assert dump_annotated(mapping, lambda steps: str(steps[-1])).splitlines() == [
        "long: >-      # long",
        f"  {'word ' * 17}word".rstrip(),
        "  word word end",
        "lines: |-     # lines",
        "  one",
        "  two",
        "list: [A, 1]  # list",
    ]


words = st.sampled_from(
    ["word", "# no", "a: b", "- x", "'", '"', "|", ">", "%", "é", " ", "\n", ""]
)
prose = st.builds(str.join, st.sampled_from([" ", "\n", " \n"]), st.lists(words, max_size=30))
values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | prose,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(keys, below, max_size=3),
    max_leaves=4,
)


@settings(deadline=None)
@given(st.dictionaries(keys, values, min_size=1))
def test_comments_change_no_value(
    tmp_path_factory: pytest.TempPathFactory, mapping: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "annotated.yaml"
    path.write_bytes(dump_annotated(mapping, lambda steps: f"at: {len(steps)} #").encode())
    assert read_mapping(path) == mapping


@pytest.mark.req("CFG-08", "CFG-10")
def test_a_module_is_shown_with_its_name_first() -> None:
    shown = keys_of_modules(show_config(WARMUP))
    assert shown == [["name", "enabled", "weight", "channels", "config"]] * len(shown)


def keys_of_modules(text: str) -> list[list[str]]:
    """The keys of each module of the objective, in their order."""
    return [list(module) for module in yaml.safe_load(text)["stage2_ab"]["pipeline"]["objective"]]


@pytest.mark.req("CFG-10")
def test_show_is_plain_when_piped_and_coloured_on_a_terminal() -> None:
    plain = cli("config", "show", "--config", WARMUP)
    assert (plain.exit_code, plain.stdout) == (0, show_config(WARMUP))
    coloured = cli("config", "show", "--config", WARMUP, FORCE_COLOR="1", TERM="xterm")
    assert "\x1b[" in coloured.stdout
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured.stdout) == plain.stdout


# --- check ------------------------------------------------------------------------------


@pytest.mark.req("CFG-10")
def test_check_tells_every_problem_of_every_file(tmp_path: Path) -> None:
    wrong = {"training": {"learning_rat": 1, "max_steps": "many"}}
    one = written(tmp_path / "one.yaml", dump_mapping(merge(load_mapping(WARMUP), wrong)))
    other = written(tmp_path / "other.yaml", f"extends: {WARMUP}\nmodle: 1\n")
    none = tmp_path / "none.yaml"
    done = cli("config", "check", "--keys-only", one, other, WARMUP, none)
    assert done.exit_code == 2
    assert done.stdout == f"{WARMUP}: valid\n"
    told = [line for line in done.stderr.splitlines() if not line.startswith("  do:")]
    assert told == [
        f"{one}: 2 problems",
        "error: training.max_steps",
        f'  found: "many" is not accepted ({line_of(one, "max_steps:")})',
        "error: training.learning_rat",
        f"  found: unknown key ({line_of(one, 'learning_rat:')})",
        f"{other}: 1 problem",
        "error: modle",
        f"  found: unknown key ({other}:2)",
        f"{none}: 1 problem",
        f"error: {none}",
        "  found: cannot be read (No such file or directory)",
    ]


@pytest.mark.req("CFG-10")
@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_every_shipped_config_is_valid(path: Path) -> None:
    done = cli("config", "check", "--keys-only", path)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{path}: valid\n")


@pytest.mark.req("CFG-10")
@pytest.mark.parametrize("subcommand", ["check", "show"])
def test_check_and_show_take_their_file_alike(subcommand: str) -> None:
    keys = ["--keys-only"] if subcommand == "check" else []
    as_word, as_option = (cli("config", subcommand, *keys, *words) for words in ALIKE)
    assert (as_word.exit_code, as_word.stdout) == (0, as_option.stdout)


ALIKE: tuple[list[str | Path], ...] = ([WARMUP], ["--config", WARMUP])


# --- Faults with their lines ------------------------------------------------------------


def faults(path: Path) -> dict[str, ContractError]:
    with pytest.raises(ContractErrors) as caught:
        load_config(path)
    return {error.where: error for error in caught.value.errors}


@pytest.mark.req("CFG-10", "CFG-04")
def test_a_fault_is_told_with_the_file_of_the_chain_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    base = load_mapping(WARMUP)
    base["stage2_ab"]["pipeline"]["objective"][1]["config"]["ciou_weight"] = -1
    base["training"]["max_steps"] = 0
    bottom = written(tmp_path / "base.yaml", dump_mapping(base))
    leaf = written(
        tmp_path / "sub" / "leaf.yaml",
        "extends: ../base.yaml\ntraining:\n  max_steps: -1\n  max_step: 1\n",
    )
    found = {where: error.found for where, error in faults(leaf).items()}
    assert found == {
        "training.max_steps": f"-1 is not accepted ({leaf}:3)",
        "training.max_step": f"unknown key ({leaf}:4)",
        "stage2_ab.pipeline.objective[1].config.ciou_weight": "-1 is not accepted "
        f"({line_of(bottom, 'ciou_weight:')})",
    }


@pytest.mark.req("CFG-10")
def test_a_missing_key_is_told_with_the_place_of_its_section(tmp_path: Path) -> None:
    base = load_mapping(WARMUP)
    del base["stage2_ab"]["pipeline"]["objective"][1]["config"]["ciou_weight"]
    del base["data"]
    path = written(tmp_path / "run.yaml", dump_mapping(base))
    missing = faults(path)
    entry = "stage2_ab.pipeline.objective[1].config"
    number = int(line_of(path, "smoothl1_weight:").rpartition(":")[2]) - 1
    assert missing[f"{entry}.ciou_weight"].found.endswith(f"missing ({entry}: {path}:{number})")
    assert missing["data"].found == "this key is required and missing"


@pytest.mark.req("CFG-04", "CFG-10")
def test_a_profiles_own_faults_and_all_others_are_told_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "stage2_two_channel" / "prod"
    folder.mkdir(parents=True)
    base = (PROFILES / "base.yaml").read_text(encoding="utf-8")
    written(folder.parent / "base.yaml", base)
    leaf = read_mapping(PROFILES / "prod" / "default.yaml")
    del leaf["training"]["run_name"]
    leaf["training"]["save_step"] = 1
    path = written(folder / "leaf.yaml", dump_mapping(leaf))
    assert faults(path).keys() == {"training.run_name", "training.save_step"}
    assert faults(path)["training.save_step"].found == (
        f"unknown key ({line_of(path, 'save_step:')})"
    )


# --- Advice on unknown keys -------------------------------------------------------------


UNDOTTED = "Write it without dots, one section inside another"


def advice(section: str, key: str) -> str:
    """What is said of an unknown key in a section of the warm-up's config."""
    overrides: dict[str, Any] = {key: 1}
    for step in reversed(section.split(".") if section else []):
        overrides = {step: overrides}
    with pytest.raises(ContractErrors) as caught:
        parse_config(merge(load_mapping(WARMUP), overrides))
    (error,) = caught.value.errors
    assert error.found == "unknown key"
    return error.do


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        ("training", "learning_rat", "The nearest known key is 'learning_rate'"),
        ("", "modle", "The nearest known key is 'model'"),
        ("training", "max_new_tokens", "Move it to rollout_matching.max_new_tokens"),
        ("", "seed", "Move it to training.seed"),
        ("data", "base_url", "Move it to rollout_matching.vllm.server.servers[].base_url"),
        ("training", "max_new_token", "The nearest known key is rollout_matching.max_new_tokens;"),
        ("model", "zzz", "Remove it, or use one of the keys here: model, torch_dtype,"),
        ("debug", "zzz", "Remove it: there are no keys here"),
        ("", "training.seed", f"{UNDOTTED}: training: {{seed: ...}}"),
        ("rollout_matching", "vllm.server.timeout_s", f"{UNDOTTED}: vllm: {{server: {{timeout_s: "),
        ("", "zzz.seed", "Remove it, or use one of the keys here"),
    ],
)
def test_an_unknown_key_is_told_what_it_may_have_meant(section: str, key: str, said: str) -> None:
    assert advice(section, key).startswith(said)


@pytest.mark.req("CFG-02")
def test_a_common_word_is_not_sent_elsewhere() -> None:
    assert advice("model", "enabled").startswith("Remove it, or use one of the keys here")


# --- the files that a YAML names


@pytest.fixture
def run_yaml(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Callable[..., Path]:
    """Writes the YAML of a run of the toy model, with sections changed."""

    def write(**sections: Any) -> Path:
        mapping = small_mapping(toy_checkpoint, toy_data, tmp_path / "run")
        return written(tmp_path / "run.yaml", dump_mapping(merge(mapping, sections)))

    return write


@pytest.mark.req("CFG-10")
def test_check_names_every_file_that_is_not_there_with_its_line(
    run_yaml: Callable[..., Path], tmp_path: Path
) -> None:
    good = cli("config", "check", run_yaml())
    assert (good.exit_code, good.stdout) == (0, f"{tmp_path / 'run.yaml'}: valid\n")
    assert not (tmp_path / "run").exists()
    file = written(tmp_path / "file", "kept")
    path = run_yaml(
        model={"model": str(tmp_path / "none")},
        data={"train_jsonl": str(tmp_path / "no.jsonl"), "val_jsonl": str(tmp_path)},
        training={"output_dir": str(file)},
    )
    bad = cli("config", "check", path)
    assert (bad.exit_code, bad.stdout) == (2, "")
    assert bad.stderr.startswith(f"{path}: 5 problems\n")
    for key, found in {
        "training.output_dir": f"{file} cannot be written to (Not a directory: {file})",
        "model.model": f"there is no folder {tmp_path / 'none'}",
        "data.train_jsonl": f"{tmp_path / 'no.jsonl'}: there is no such file",
        "data.val_jsonl": f"{tmp_path}: ",
    }.items():
        line = line_of(path, f"{key.partition('.')[2]}: ")
        assert re.search(
            rf"error: {key}\n  found: {re.escape(found)}.*\({re.escape(line)}\)", bad.stderr
        )
    only_keys = cli("config", "check", "--keys-only", path)
    assert (only_keys.exit_code, only_keys.stderr) == (0, "")


@pytest.mark.req("CFG-10")
def test_check_looks_at_the_first_sample_of_each_file(
    run_yaml: Callable[..., Path], tmp_path: Path
) -> None:
    record = {"images": ["none.png"], "width": 8, "height": 8, "objects": []}
    data = written(tmp_path / "train.jsonl", f"{json.dumps(record)}\n")
    said = cli("config", "check", run_yaml(data={"train_jsonl": str(data)}))
    assert said.exit_code == 2
    assert f"error: data.train_jsonl\n  found: {data}:1: " in said.stderr
    assert "none.png" in said.stderr


@pytest.mark.req("CFG-10")
def test_a_name_of_the_hub_is_no_folder_and_says_how_to_fetch_it(
    run_yaml: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    said = cli("config", "check", run_yaml(model={"model": "Qwen/Qwen3-VL-4B-Instruct"})).stderr
    assert f"found: there is no folder {tmp_path}/Qwen/Qwen3-VL-4B-Instruct" in said
    assert "first: hf download Qwen/Qwen3-VL-4B-Instruct --local-dir DIR" in said
    misspelt = cli("config", "check", run_yaml(model={"model": "models/qwen3-lv"})).stderr
    assert "there is no folder" in misspelt
    assert "hf download" not in misspelt


@pytest.mark.req("CFG-10")
def test_target_modules_that_are_not_in_the_checkpoint_are_named(
    run_yaml: Callable[..., Path],
) -> None:
    tuner = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 2}
    fits = ["q_proj", "layers.0.self_attn.v_proj", "lm_head", "embed_tokens"]
    good = cli("config", "check", run_yaml(tuner={**tuner, "target_modules": fits}))
    assert good.exit_code == 0, good.stderr
    bad = ["q_proj", "q_prj", ".*k_proj"]
    said = cli("config", "check", run_yaml(tuner={**tuner, "target_modules": bad}))
    assert (said.exit_code, said.stderr.count("error: ")) == (2, 2)
    assert 'error: tuner.target_modules[1]\n  found: "q_prj" is the end of no' in said.stderr
    assert 'error: tuner.target_modules[2]\n  found: ".*k_proj" is the end of no' in said.stderr
