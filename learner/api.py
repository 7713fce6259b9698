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

The import loads no torch.
"""

from learner.config import load_config
from learner.rollout.distribution import (
    plan_chunks,
    rank_chunk_size,
    request_seed,
    rollout_seed_base,
)
from learner.stages.formats.coord_json import parse_rollout, serialize_append
from learner.stages.matching import mask_iou, match_objects
from learner.stages.packing import plan_packs, select_segments
from learner.stages.schedule import channel_for_step
from learner.stages.targets import build_target
from learner.stages.tokens import decode_bin, encode_bin
from learner.stages.transport_plan import sinkhorn_barycentric
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import RepeatGuard, RepeatTerminateConfig

__all__ = [
    "ContractError",
    "RepeatGuard",
    "RepeatTerminateConfig",
    "build_target",
    "channel_for_step",
    "decode_bin",
    "encode_bin",
    "load_config",
    "mask_iou",
    "match_objects",
    "parse_rollout",
    "plan_chunks",
    "plan_packs",
    "rank_chunk_size",
    "request_seed",
    "rollout_seed_base",
    "select_segments",
    "serialize_append",
    "sinkhorn_barycentric",
]
