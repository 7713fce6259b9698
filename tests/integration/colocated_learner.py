"""A learner of its own for the tests: `python -m ... CONFIG WEIGHTS`, answers on request.

For every line on stdin it pushes its weights if need be, answers all samples greedily, and
prints one JSON line of the outputs. It closes its backend at the end of stdin.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from learner.config import Config, load_config
from learner.models.load import load_model
from learner.rollout.policy import Policy, asking_of
from learner.training.backends import open_backend
from learner.training.input_checks import check_backend, read_inputs
from learner.types import RolloutOutput, Sample
from tests.contract.toy_checkpoints import set_weights


def samples_of(config: Config) -> list[Sample]:
    """Those of the config's data, and one without an image."""
    scenes = read_inputs(config).train
    return [*scenes, replace(scenes[0], images=())]


def as_line(outputs: Sequence[RolloutOutput]) -> str:
    """All fields of all outputs as one line of JSON."""
    return json.dumps([asdict(output) for output in outputs])


def main() -> None:
    config, weights = load_config(sys.argv[1]), Path(sys.argv[2])
    placement = check_backend(config, {})
    samples = samples_of(config)
    loaded = load_model(config)
    set_weights(loaded.model, weights)
    folder = Path(config.training.output_dir)
    backend = open_backend(config, loaded, [], folder, samples, placement)
    policy = Policy(backend, asking_of(config))
    try:
        for _ in sys.stdin:
            policy.push_if_stale()
            print(as_line(policy.answer(samples, seed=7)), flush=True)
    finally:
        policy.close()


if __name__ == "__main__":
    main()
