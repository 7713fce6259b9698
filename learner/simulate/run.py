"""The first steps of a run, on simulated machines."""

from learner.simulate.engines import Use
from learner.simulate.machines import Machines, Setting
from learner.simulate.outcome import Outcome, ServerUse, SimulatedStep
from learner.simulate.rank import Rank

__all__ = ["Setting", "simulate"]


def simulate(setting: Setting) -> Outcome:
    """Run the simulation; the same setting gives the same numbers.

    Raises:
        ContractError: what a run would end with, such as a segment that no pack can hold.
    """
    setting.check()
    machines = Machines(setting)
    records = [SimulatedStep(step, "A") for step in range(min(setting.steps, setting.run_steps))]
    ranks = [Rank(machines, rank, records) for rank in range(setting.ranks)]
    processes = [machines.env.process(rank.run()) for rank in ranks]
    machines.env.run(machines.env.all_of(processes))
    seconds = machines.env.now
    return Outcome(
        steps=records,
        run_steps=setting.run_steps,
        servers=[_use(engines, seconds) for engines in machines.uses],
        learner_busy=sum(rank.busy_s for rank in ranks) / (seconds * setting.ranks),
        rollout_gpus=sum(setting.world_sizes) if machines.servers else 0,
        learner_gpus=setting.ranks,
        colocated=setting.config.rollout_matching.backend == "colocate",
        asynchronous=setting.config.rollout_matching.async_rollout.enabled,
    )


def _use(engines: list[Use], seconds: float) -> ServerUse:
    busy = sum(use.busy_s for use in engines)
    return ServerUse(
        busy=busy / (seconds * len(engines)),
        running=sum(use.decoded_s for use in engines) / busy if busy else 0.0,
        tokens_per_s=sum(use.tokens for use in engines) / seconds,
    )
