"""The names that other programs may call (ARCH-02).

    from learner.api import build_target, match_objects, parse_rollout

| name | what it does |
| --- | --- |
| `encode_bin`, `decode_bin` | a coordinate in [0, 1] to its bin 0 to 999, and back |
| `parse_rollout` | the token ids of an answer to its objects, strictly |
| `serialize_append` | objects as text that continues an answer |
| `match_objects`, `mask_iou` | predictions to ground truth, and the IoU of two shapes |
| `sinkhorn_barycentric` | target points of a polygon by optimal transport |
| `build_target` | a parsed and matched answer to the tokens that are trained on |
| `select_segments`, `plan_packs` | segments of one pack, and packs of a step |
| `plan_chunks`, `rank_chunk_size` | requests of a call to servers |
| `rollout_seed_base`, `request_seed` | seeds of a step and of a request |
| `channel_for_step` | channel A or B of a step |
| `load_config` | a training YAML to its typed config |
| `RepeatGuard`, `RepeatTerminateConfig` | the guard against repetition, and its settings |
| `ContractError` | the error of bad input: where, what was found, what to do |

A name's module is imported when the name is first used, so `import learner.api` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from learner.config import load_config as load_config
    from learner.rollout.distribution import plan_chunks as plan_chunks
    from learner.rollout.distribution import rank_chunk_size as rank_chunk_size
    from learner.rollout.seeds import request_seed as request_seed
    from learner.rollout.seeds import rollout_seed_base as rollout_seed_base
    from learner.stages.coords import decode_bin as decode_bin
    from learner.stages.coords import encode_bin as encode_bin
    from learner.stages.formats.coord_json import parse_rollout as parse_rollout
    from learner.stages.formats.coord_json import serialize_append as serialize_append
    from learner.stages.matching import mask_iou as mask_iou
    from learner.stages.matching import match_objects as match_objects
    from learner.stages.packing.plan import plan_packs as plan_packs
    from learner.stages.packing.plan import select_segments as select_segments
    from learner.stages.schedule import channel_for_step as channel_for_step
    from learner.stages.targets import build_target as build_target
    from learner.stages.transport_plan import sinkhorn_barycentric as sinkhorn_barycentric
    from shared_contracts.errors import ContractError as ContractError
    from shared_contracts.repeat_guard import RepeatGuard as RepeatGuard
    from shared_contracts.repeat_guard import RepeatTerminateConfig as RepeatTerminateConfig

_MODULES = {
    "ContractError": "shared_contracts.errors",
    "RepeatGuard": "shared_contracts.repeat_guard",
    "RepeatTerminateConfig": "shared_contracts.repeat_guard",
    "build_target": "learner.stages.targets",
    "channel_for_step": "learner.stages.schedule",
    "decode_bin": "learner.stages.coords",
    "encode_bin": "learner.stages.coords",
    "load_config": "learner.config",
    "mask_iou": "learner.stages.matching",
    "match_objects": "learner.stages.matching",
    "parse_rollout": "learner.stages.formats.coord_json",
    "plan_chunks": "learner.rollout.distribution",
    "plan_packs": "learner.stages.packing.plan",
    "rank_chunk_size": "learner.rollout.distribution",
    "request_seed": "learner.rollout.seeds",
    "rollout_seed_base": "learner.rollout.seeds",
    "select_segments": "learner.stages.packing.plan",
    "serialize_append": "learner.stages.formats.coord_json",
    "sinkhorn_barycentric": "learner.stages.transport_plan",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return list(_MODULES)
