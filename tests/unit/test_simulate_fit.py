"""Speeds and lengths that are fitted to a run's log give the run again, and predict others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_resolved
from learner.operate.simulate import Outcome, Setting, simulate
from learner.operate.simulate.inputs import ChannelSpeeds, EngineSpeed, ServerShape
from learner.operate.simulate.logged import fit, pool_of, read_run
from shared_contracts.errors import ContractError
from tests.unit.simulated import in_step_mode_and_ahead, setting, simulated_config

SPEEDS: dict[str, Any] = {
    "engine": {
        "call_s": 0.02,
        "prefill_tokens_per_s": 8000.0,
        "step_s": 0.015,
        "step_per_sequence_s": 0.002,
    },
    "learner": {
        "a": {"target_s": 0.004, "pack_s": 0.001, "learn": {"forward_s": 0.05, "token_s": 0.0004}},
        "b": {"target_s": 0.007, "pack_s": 0.001, "learn": {"forward_s": 0.03, "token_s": 0.0005}},
        "update_s": 0.04,
    },
    "push": {"fixed_s": 0.2, "gigabytes": 0.5, "gb_per_s": 1.0},
}
HF = {"rollout_matching": {"rollout_backend": "hf"}}
LONG = {"max_steps": 40, "save_steps": 40, "effective_batch_size": 12}


def logged(folder: Path, source: Setting) -> Outcome:
    """The run folder that a run with exactly the simulated times would leave."""
    source = replace(source, steps=source.run_steps)
    outcome = simulate(source)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "resolved_config.yaml").write_text(dump_resolved(source.config))
    (folder / "run.json").write_text("{}")
    push = source.speeds.push
    lines: list[dict[str, Any]] = []
    for step in outcome.steps:
        line = {
            "step": step.step + 1,
            "loss": 1.0,
            "step/channel_b": float(step.channel == "B"),
            "packing/post_rollout_segments": step.segments,
            "packing/post_rollout_packs": step.forwards - step.replays,
            "packing/post_rollout_selected_total_len": step.tokens,
            "step/replays": step.replays,
            "time/step_s": step.seconds,
            **{f"time/{phase}_s": seconds for phase, seconds in step.phases.items()},
        }
        if step.channel == "B":
            line |= {"sync/bytes": push.gigabytes * 1e9, "sync/gb_per_s": push.gb_per_s}
            _log_rollouts(
                folder / "rollouts" / f"step_{step.step + 1:06d}.jsonl", source, step.step
            )
        lines.append(line)
    lines.append({"step": len(lines), "train_runtime": outcome.seconds})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return outcome


def _log_rollouts(file: Path, source: Setting, step: int) -> None:
    tokens = [source.lengths.of(step, i) for i in source.order.rank_batch(step, 0)]
    lines = [
        {"prompt_token_ids": [[7, t.prompt]], "response_token_ids": [9] * t.answer} for t in tokens
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("sections", [{}, HF], ids=["server", "transformers"])
def test_a_fitted_run_predicts_one_of_another_batch_and_decode_batch_size(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    rollout = sections.get("rollout_matching", {})
    fitted_to = setting(SPEEDS, training=LONG, rollout_matching=rollout | {"decode_batch_size": 8})
    logged(tmp_path, fitted_to)
    run = read_run(tmp_path)
    speeds = fit(run, ServerShape()).speeds
    other = simulated_config(
        training=LONG | {"effective_batch_size": 20, "seed": 5},
        rollout_matching=rollout | {"decode_batch_size": 5},
    )
    told = simulate(replace(fitted_to, config=other, steps=40))
    predicted = simulate(Setting(other, speeds, pool_of(run, other, seed=3), steps=40))
    for channel in ("A", "B"):
        assert predicted.step_s(channel) == pytest.approx(told.step_s(channel), rel=0.15)
    assert predicted.run_seconds == pytest.approx(told.run_seconds, rel=0.15)


def test_speeds_are_found_where_the_log_tells_them_apart(tmp_path: Path) -> None:
    logged(tmp_path, setting(SPEEDS, training=LONG | {"packing": False}))
    found = fit(read_run(tmp_path), ServerShape())
    learner = found.speeds.learner
    assert learner.b.target_s == pytest.approx(0.007)
    assert learner.b.pack_s == pytest.approx(0.001)
    assert learner.update_s == pytest.approx(0.04)
    assert found.speeds.push.seconds == pytest.approx(0.7)
    assert found.speeds.engine.step_s == pytest.approx(0.015, rel=0.5)
    assert set(found.sources) >= {"engine", "push", "learner.update_s", "learner.a.learn"}


def test_lengths_of_a_log_are_whole_samples_of_it(tmp_path: Path) -> None:
    source = setting(SPEEDS, training=LONG)
    logged(tmp_path, source)
    pool = pool_of(read_run(tmp_path), source.config, seed=0)
    answered = {
        (t.prompt, t.answer)
        for step in range(40)
        for i in source.order.rank_batch(step, 0)
        for t in [source.lengths.of(step, i)]
    }
    drawn = [pool.of(1, i) for i in range(50)]
    assert {(t.prompt, t.answer) for t in drawn} <= answered
    assert len(set(drawn)) > 10
    assert drawn == [pool.of(1, i) for i in range(50)]


def test_a_run_without_channel_b_has_speeds_of_learning_alone(tmp_path: Path) -> None:
    logged(tmp_path, setting(SPEEDS, stage2_ab={"schedule": {"b_ratio": 0.0}}))
    run = read_run(tmp_path)
    found = fit(run, ServerShape())
    assert found.sources["engine"].startswith("default")
    assert found.speeds.learner.b.learn == found.speeds.learner.a.learn
    with pytest.raises(ContractError, match="no answers are logged"):
        pool_of(run, run.config, seed=0)


def test_a_run_ahead_of_its_training_says_nothing_of_the_engine(tmp_path: Path) -> None:
    _, ahead = in_step_mode_and_ahead(speeds=SPEEDS, training=LONG)
    logged(tmp_path, ahead)
    found = fit(read_run(tmp_path), ServerShape())
    assert found.speeds.engine == EngineSpeed()
    assert found.sources["engine"] == "default: answers were made beside the steps"
    assert found.speeds.learner.b.target_s == ChannelSpeeds().target_s
    assert found.sources["learner.b.target_s, pack_s"].startswith("default")
    assert found.speeds.learner.a.target_s == pytest.approx(0.004)


def test_a_run_that_went_on_is_fitted_from_where_it_did(tmp_path: Path) -> None:
    logged(tmp_path, setting(SPEEDS, training=LONG))
    file = tmp_path / "metrics.jsonl"
    *steps, end = map(json.loads, file.read_text().splitlines())
    spent = sum(line["time/step_s"] + 0.04 for line in steps[20:])
    end["train_runtime"] = spent  # as the Trainer counts
    file.write_text("".join(json.dumps(line) + "\n" for line in [*steps, end]))
    (tmp_path / "run.json").write_text(json.dumps({"started_at_step": 20}))
    run = read_run(tmp_path)
    assert len(run.all_steps) == 20
    assert fit(run, ServerShape()).speeds.learner.update_s == pytest.approx(0.04)
    (tmp_path / "run.json").write_text(json.dumps({"started_at_step": 40}))
    with pytest.raises(ContractError, match="no step is logged after step 40"):
        read_run(tmp_path)


def test_a_run_counted_in_steps_may_be_simulated_with_other_batches(tmp_path: Path) -> None:
    source = setting(SPEEDS, training=LONG)
    logged(tmp_path, source)
    other = simulated_config(training=LONG | {"effective_batch_size": 64})
    pool = pool_of(read_run(tmp_path), source.config, seed=0)
    assert simulate(Setting(other, source.speeds, pool, steps=4)).steps[0].samples == 64


@pytest.mark.parametrize(
    ("text", "found"), [(None, "is no run folder"), ("", "no step"), ("{\n", "no JSON")]
)
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, text: str | None, found: str) -> None:
    (tmp_path / "resolved_config.yaml").write_text(dump_resolved(simulated_config()))
    if text is not None:
        (tmp_path / "run.json").write_text("{}")
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ContractError) as refused:
        read_run(tmp_path)
    assert found in refused.value.found


def test_a_run_that_goes_on_is_read_up_to_the_line_that_is_being_written(tmp_path: Path) -> None:
    logged(tmp_path, setting(SPEEDS))
    file = tmp_path / "metrics.jsonl"
    whole = read_run(tmp_path)
    file.write_text(file.read_text() + '{"step": 13, "lo')
    assert read_run(tmp_path) == whole
