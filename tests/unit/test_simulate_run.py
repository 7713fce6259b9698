"""What must hold of every simulated run, in step mode and with rollouts ahead."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Environment

from learner.operate.simulate import Setting, simulate
from learner.operate.simulate.engines import Wait
from learner.operate.simulate.inputs import Speeds, declared_shape
from learner.operate.simulate.run import Making, prefetched
from learner.stages.packing import Chunk
from shared_contracts.errors import ContractError
from tests.unit.simulated import EQUAL, SPREAD, in_step_mode_and_ahead, setting

FREE_LEARNER: dict[str, Any] = {
    channel: {"target_s": 0.0, "pack_s": 0.0, "learn": {"forward_s": 0.0, "token_s": 0.0}}
    for channel in ("a", "b")
}
NOTHING_BUT_ROLLOUTS: dict[str, Any] = {
    "learner": FREE_LEARNER | {"update_s": 0.0},
    "push": {"fixed_s": 0.0, "gigabytes": 0.0},
}
HF: dict[str, Any] = {"rollout_matching": {"rollout_backend": "hf"}}


@pytest.mark.req("STEP-02")
@given(servers=st.integers(1, 4), ranks=st.sampled_from([1, 2, 4]), batch=st.sampled_from([4, 8]))
@settings(max_examples=25)
def test_every_sample_of_a_step_is_asked_once_and_trained_on_once(
    servers: int, ranks: int, batch: int
) -> None:
    outcome = simulate(
        setting(servers=servers, ranks=ranks, rollout_matching={"decode_batch_size": batch})
    )
    assert all(step.segments == step.samples == 16 for step in outcome.steps)
    answered = sum(use.tokens_per_s for use in outcome.servers) * outcome.seconds
    lengths = setting(servers=servers, ranks=ranks).lengths
    order = setting(ranks=ranks).order
    expected = sum(
        lengths.of(step.step, i).answer
        for step in outcome.of("B")
        for rank in range(ranks)
        for i in order.rank_batch(step.step, rank)
    )
    assert answered == pytest.approx(expected)


def test_the_same_setting_gives_the_same_numbers_and_another_seed_others() -> None:
    assert simulate(setting(servers=2, ranks=2)) == simulate(setting(servers=2, ranks=2))
    assert simulate(setting(seed=0)).seconds != simulate(setting(seed=1)).seconds


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_with_equal_answers_another_server_never_makes_a_step_slower(ranks: int) -> None:
    steps = [
        simulate(setting(servers=n, ranks=ranks, lengths=EQUAL)).step_s("B") for n in (1, 2, 4, 8)
    ]
    assert None not in steps
    assert steps == sorted(steps, reverse=True, key=lambda seconds: seconds or 0.0)
    assert steps[0] != steps[-1]


def test_where_the_learner_takes_no_time_a_step_is_its_rollouts() -> None:
    for step in simulate(setting(NOTHING_BUT_ROLLOUTS)).of("B"):
        assert step.seconds == pytest.approx(step.phases["rollout"])
        assert step.seconds > 0


@pytest.mark.req("STEP-03")
@given(
    forward_s=st.floats(0.0, 1.0), servers=st.integers(1, 4), decode_batch_size=st.integers(1, 8)
)
@settings(max_examples=25)
def test_a_pipelined_step_is_no_shorter_than_its_longest_part_and_no_longer_than_their_sum(
    forward_s: float, servers: int, decode_batch_size: int
) -> None:
    speeds = {"learner": {"b": {"learn": {"forward_s": forward_s}}}}
    size = {"decode_batch_size": decode_batch_size}
    for step in simulate(setting(speeds, servers=servers, rollout_matching=size)).of("B"):
        parts = dict(step.phases)
        pushed, _ = parts.pop("push"), parts.pop("wait")
        longest = max(parts["rollout"], parts["target"] + parts["pack"], parts["learn"])
        assert pushed + longest <= step.seconds + 1e-9
        assert step.seconds <= pushed + sum(parts.values()) + 1e-9


def test_rollouts_of_the_next_round_are_made_while_the_last_is_learned() -> None:
    speeds = {"learner": {"b": {"learn": {"forward_s": 0.5}}}}
    for step in simulate(setting(speeds, global_max_length=220)).of("B"):
        parts = sum(step.phases[name] for name in ("push", "rollout", "target", "pack", "learn"))
        assert step.seconds < parts - 0.5


@pytest.mark.req("STEP-03")
def test_rollouts_of_the_next_round_are_made_while_the_last_is_assessed() -> None:
    """Some answers come while nobody waits for them: rollouts alone tell how long they take."""
    alone = simulate(setting(NOTHING_BUT_ROLLOUTS)).of("B")
    for step, rollouts in zip(
        simulate(setting({"learner": {"b": {"target_s": 0.5}}})).of("B"), alone, strict=True
    ):
        parts = sum(step.phases[name] for name in ("push", "target", "pack", "learn"))
        assert step.phases["rollout"] < rollouts.seconds
        assert step.seconds < parts + rollouts.seconds - 0.5


@pytest.mark.req("STEP-03")
def test_one_round_waits_and_one_is_made_while_another_is_learned() -> None:
    env = Environment()
    begun: list[float] = []

    def quick() -> Making:
        begun.append(env.now)
        yield env.timeout(1.0)
        return Chunk([], len(begun) == 5)

    def learning() -> Wait:
        rounds = prefetched(env, quick)
        last = False
        while not last:
            _, last = yield rounds.get()
            yield env.timeout(10.0)

    env.run(env.process(learning()))
    assert begun == [0.0, 1.0, 2.0, 11.0, 21.0]


def test_a_learner_that_generates_itself_does_one_after_the_other() -> None:
    for step in simulate(setting(**HF)).of("B"):
        names = ("push", "rollout", "target", "pack", "learn")
        assert step.seconds == pytest.approx(sum(step.phases[name] for name in names))
        assert step.phases["push"] == 0


@pytest.mark.req("DIST-04")
def test_a_colocated_server_is_asked_slice_by_slice_and_nothing_is_learned_meanwhile() -> None:
    own: dict[str, Any] = {"rollout_matching": {"vllm": {"mode": "colocate", "server": None}}}
    asked = setting(lengths=EQUAL, **own)
    engine = asked.speeds.engine
    a_slice = engine.call_s + 4 * 50 / engine.prefill_tokens_per_s
    a_slice += 20 * (engine.step_s + 4 * engine.step_per_sequence_s)
    for step in simulate(asked).of("B"):
        assert step.phases["rollout"] == pytest.approx(4 * a_slice)
        names = ("push", "rollout", "target", "pack", "learn")
        assert step.seconds == pytest.approx(sum(step.phases[name] for name in names))
    outcome = simulate(replace(asked, speeds=Speeds(server=declared_shape(asked.config))))
    assert outcome.gpus == 1, "the learner has one of its server's"
    own["rollout_matching"]["vllm"]["tensor_parallel_size"] = 2
    shape = declared_shape(setting(**own).config)
    assert simulate(replace(asked, speeds=Speeds(server=shape))).gpus == 2


def test_gradients_of_several_ranks_are_synchronized_once_a_step() -> None:
    free, dear = (
        simulate(setting({"learner": {"sync_s": seconds}}, ranks=2)) for seconds in (0.0, 1.5)
    )
    for before, after in zip(free.steps, dear.steps, strict=True):
        assert after.seconds == pytest.approx(before.seconds + 1.5)


def test_a_step_of_channel_a_is_targets_and_a_forward_for_each_pack() -> None:
    speeds = {"a": {"target_s": 0.25, "pack_s": 0, "learn": {"forward_s": 2, "token_s": 0.125}}}
    no_packing = {"packing": False}
    outcome = simulate(setting({"learner": speeds}, lengths=EQUAL, training=no_packing))
    assert outcome.step_s("A") == pytest.approx(16 * (0.25 + 2 + 75 * 0.125))


def test_channel_a_forwards_as_often_as_it_iterates() -> None:
    learn = {"a": {"target_s": 0, "pack_s": 0, "learn": {"forward_s": 1, "token_s": 0}}}
    once = simulate(setting({"learner": learn}))
    thrice = simulate(setting({"learner": learn}, stage2_ab={"n_softctx_iter": 3}))
    assert thrice.step_s("A") == pytest.approx(3 * (once.step_s("A") or 0.0))


@pytest.mark.req("DDP-02")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_run_as_many_forwards_and_replay_what_they_lack(ranks: int) -> None:
    outcome = simulate(setting(ranks=ranks, global_max_length=220))
    assert all(step.forwards % ranks == 0 for step in outcome.steps)
    replays = sum(step.replays for step in outcome.steps)
    assert replays == 0 if ranks == 1 else replays > 0


def test_a_run_lasts_as_long_as_its_steps_do_at_the_pace_of_the_first() -> None:
    long = setting(training={"max_steps": 1200, "save_steps": 1200})
    outcome = simulate(replace(long, steps=10))
    assert len(outcome.steps) == 10
    assert outcome.run_seconds == pytest.approx(120 * outcome.seconds)


def test_a_run_over_epochs_has_as_many_steps_as_training_makes() -> None:
    """Of 200 samples an epoch takes 12 steps of 16; a started epoch's last step is made."""
    epochs = {"max_steps": None, "num_train_epochs": 1.3, "save_steps": 5}
    assert setting(training=epochs).run_steps == 16


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        (lambda: setting(ranks=3), "training.effective_batch_size"),
        (lambda: setting(training={"effective_batch_size": 400}), "training.effective_batch_size"),
        (lambda: setting(ranks=8, rollout_matching={"decode_batch_size": 1}), "decode_batch_size"),
        (lambda: setting(servers=2, **HF), "servers"),
        (lambda: setting(global_max_length=130), "global_max_length"),
        (lambda: setting(training={"packing_buffer": 4}), "training.packing_buffer"),
        (lambda: setting(training={"data_parallel": "fsdp2"}), "training.data_parallel"),
    ],
    ids=["ranks", "samples", "places", "servers", "length", "buffer", "sharding"],
)
def test_what_no_run_could_have_is_refused_as_a_run_refuses_it(asked: Any, where: str) -> None:
    with pytest.raises(ContractError) as refused:
        simulate(asked())
    assert where in refused.value.where


# ---- rollouts ahead of training ---------------------------------------------------------


def ahead(**kwargs: Any) -> Setting:
    return in_step_mode_and_ahead(**kwargs)[1]


@pytest.mark.req("ASYNC-01")
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_step_trains_on_a_whole_share_and_none_twice(ranks: int) -> None:
    outcome = simulate(ahead(ranks=ranks))
    assert all(step.segments == step.samples == 16 for step in outcome.steps)
    assert len(outcome.steps) == 12


@pytest.mark.req("ASYNC-01")
def test_a_step_of_channel_b_that_finds_no_rollouts_runs_channel_a() -> None:
    slow = {"engine": {"step_s": 5.0}}
    off, on = in_step_mode_and_ahead(speeds=slow)
    outcome = simulate(on)
    assert [step.skipped for step in outcome.steps] == [
        step.channel == "B" for step in simulate(off).steps
    ]
    assert outcome.of("B") == []


@pytest.mark.req("ASYNC-01")
def test_where_rollouts_are_free_a_run_ahead_of_training_lasts_as_long_as_its_learning() -> None:
    free = {
        "engine": {
            "call_s": 0.0,
            "prefill_tokens_per_s": 1e12,
            "step_s": 1e-9,
            "step_per_sequence_s": 0.0,
        },
        "push": {"fixed_s": 0.0, "gigabytes": 0.0},
    }
    outcome = simulate(ahead(speeds=free))
    assert sum(step.skipped for step in outcome.steps) <= 1
    for step in outcome.of("B"):
        assert step.seconds == pytest.approx(step.phases["learn"], abs=1e-6)


@pytest.mark.req("ASYNC-01")
@given(step_s=st.floats(0.0005, 0.05), every=st.sampled_from([1, 2, 4]))
@settings(max_examples=25)
def test_a_run_ahead_of_training_is_no_shorter_than_its_pushes_and_its_learning(
    step_s: float, every: int
) -> None:
    settings_of = {"enabled": True, "sync_every_steps": every}
    outcome = simulate(
        setting({"engine": {"step_s": step_s}}, rollout_matching={"async_rollout": settings_of})
    )
    push = setting().speeds.push.seconds
    pushes = -(-len(outcome.steps) // every)
    learned = sum(step.phases["learn"] + step.update_s for step in outcome.steps)
    assert outcome.seconds >= learned + pushes * push - 1e-9
    assert sum(step.phases.get("push", 0.0) > 0 for step in outcome.steps) == pushes


@pytest.mark.req("SYNC-09")
def test_a_push_waits_for_the_round_that_is_being_answered() -> None:
    outcome = simulate(ahead(speeds={"engine": {"step_s": 0.05}}))
    alone = setting().speeds.push.seconds
    pushes = [step.phases["push"] for step in outcome.steps]
    assert pushes[0] == pytest.approx(alone)
    assert max(pushes) > alone + 0.5


@pytest.mark.req("ASYNC-01")
def test_where_servers_and_learner_take_as_long_being_ahead_saves_time() -> None:
    speeds = {
        "learner": {"b": {"learn": {"forward_s": 0.5}}, "a": {"learn": {"forward_s": 0.5}}},
        "push": {"fixed_s": 0.0, "gigabytes": 0.0},
        "engine": {"call_s": 0.0},
    }
    off, on = in_step_mode_and_ahead(
        speeds=speeds, training={"max_steps": 60, "save_steps": 60, "effective_batch_size": 16}
    )
    assert simulate(on).seconds < simulate(off).seconds


@pytest.mark.req("ASYNC-01")
def test_packs_of_too_old_weights_are_dropped_and_counted() -> None:
    slow = {"engine": {"step_s": 0.05}}
    window = {"async_rollout": {"enabled": True, "version_window": 1}}
    dropping = simulate(setting(slow, rollout_matching=window))
    keeping = simulate(
        ahead(speeds=slow, rollout_matching={"async_rollout": {"version_window": 100}})
    )
    assert sum(step.stale for step in dropping.steps) > 0
    assert sum(step.stale for step in keeping.steps) == 0


def test_lengths_spread_as_they_were_given() -> None:
    lengths = setting(lengths=SPREAD).lengths
    drawn = [lengths.of(0, i) for i in range(SPREAD.samples)]
    assert {min(t.prompt for t in drawn) >= 40, max(t.prompt for t in drawn) <= 90} == {True}
    assert sorted(t.answer for t in drawn)[100] == pytest.approx(20, abs=8)
    assert drawn[3] == lengths.of(0, 3)
    assert drawn[3].answer != lengths.of(1, 3).answer
