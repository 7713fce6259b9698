"""`--run-config`: the settings that a training YAML gives its servers (CFG-09, REP-04).

    rollout_matching.decode_batch_size    per GPU; `max_num_seqs` is per replica
    rollout_matching.repeat_terminate     repeat_terminate
    rollout_matching.vllm.sync.transport  weight_transport, unless it is `auto`

`extends` is followed and YAML is read as the learner does. Of the rest of the file nothing
is looked at: what else may be wrong in it is the learner's to say.
"""

from functools import partial
from pathlib import Path

from pydantic import ValidationError

from rollout_server.yaml_file import read_yaml
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.extends import merge_chain, read_chain
from shared_contracts.rollout_config import SharedRolloutConfig
from shared_contracts.strict_model import contract_errors, joined, shown

OPTION = "--run-config"
SECTION = "rollout_matching"


def read_run_config(path: Path) -> SharedRolloutConfig:
    """What a training YAML says to learner and servers alike.

    Raises ContractErrors naming every bad key of that part by its path in the file.
    """
    _, mappings = read_chain(path, partial(read_yaml, option=OPTION))
    section = merge_chain(mappings).get(SECTION)
    if not isinstance(section, dict):
        raise ContractError(
            SECTION, f"{path} has {shown(section)} there, not a mapping", "Name a training YAML"
        )
    known = {k: v for k, v in section.items() if k in SharedRolloutConfig.model_fields}
    try:
        return SharedRolloutConfig.model_validate(known)
    except ValidationError as error:
        raise ContractErrors(
            [
                ContractError(joined(SECTION, fault.where), fault.found, fault.do)
                for fault in contract_errors(error, SharedRolloutConfig)
            ]
        ) from None
