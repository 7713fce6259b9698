"""Answers of the server's probes (WIRE-06), and the token that calls carry."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.weights import Count, Transport, WeightState, Wire

# The environment variables of both programs with the server's token, or with a file that holds it.
TOKEN_VARIABLE = "ROLLOUT_SERVER_TOKEN"
TOKEN_FILE_VARIABLE = "ROLLOUT_SERVER_TOKEN_FILE"

# serving       answers calls
# starting      its engine is being built
# needs-push    rebuilt with the checkpoint's weights, which are outdated
# asleep        its memory is released, until a push or `/wake_up/`
# dead          its engine has ended; it will be rebuilt
ReplicaState = Literal["serving", "starting", "needs-push", "asleep", "dead"]

Workers = Annotated[int, Field(ge=1, le=2**20)]


class ReplicaStatus(Wire):
    """The state of one replica.

    detail: reason why it does not serve; empty if it serves.
    heartbeat_age_s: seconds since the engine's loop last answered; null without an engine.
    restarts: number of times that the engine was rebuilt.
    """

    index: Count
    state: ReplicaState
    detail: str
    heartbeat_age_s: float | None
    restarts: Count


class Health(Wire):
    """`GET /health/`: 200 if every replica can answer `/infer/`; during a push, calls wait."""

    status: Literal["ok"] = "ok"
    state: WeightState
    weights_version: Count
    server_epoch: str
    replicas: list[ReplicaStatus]


class Live(Wire):
    """`GET /live/`: the event loop runs; seconds since each engine last answered."""

    status: Literal["ok"] = "ok"
    server_epoch: str
    heartbeat_age_s: list[float | None]


class WorldSize(Wire):
    """`GET /get_world_size/`: engine workers over all replicas."""

    world_size: Workers


class RepeatTerminateStatus(Wire):
    """The repeat guard of the server.

    active: every worker of every engine runs it with `config`.
    """

    active: bool
    config: RepeatTerminateConfig


class Info(Wire):
    """`GET /info/`: facts about this server, also while engines start.

    world_size: engine workers over all replicas.
    max_model_len: tokens of a context; null until an engine is ready.
    enable_lora: the server accepts adapters instead of full weights.
    enable_prefix_caching: the engines reuse the caches of equal prompts; null: not reported.
    server_epoch: changes if the server is restarted or a replica is lost.
    owner: the learner that pushes to this server; null without one.
    host: name of the server's machine. gpus: ids of its GPUs; empty on a CPU or with Ray.
    gpu_uuids: UUIDs of these GPUs, if nvidia-smi reported them at the start.
    versions: of this server and its main libraries, by distribution name.
    """

    model: str
    world_size: Workers
    replicas: list[ReplicaStatus]
    max_model_len: Count | None
    max_num_seqs: Count
    enable_lora: bool
    enable_prefix_caching: bool | None = None
    weights_state: WeightState
    weights_version: Count
    weight_transport: Transport
    server_epoch: str
    owner: str | None = None
    host: str = ""
    gpus: list[Count] = Field(default=[])
    gpu_uuids: list[str] = Field(default=[])
    repeat_terminate: RepeatTerminateStatus
    versions: dict[str, str]


def given_token(
    environment: Mapping[str, str], option: Path | None = None, *, refuse_empty: bool = False
) -> str | None:
    """Return the token of calls, from `option` (`token_file`) or either variable; None without one.

    refuse_empty: an empty TOKEN_VARIABLE is an error; else it counts as not set.

    Raises ContractError for a token that a header cannot contain, an unreadable file, and two
    different tokens.
    """
    files = {} if option is None else {"token_file": option}
    if path := environment.get(TOKEN_FILE_VARIABLE):
        files[TOKEN_FILE_VARIABLE] = Path(path)
    tokens = {where: _read(file, where) for where, file in files.items()}
    value = environment.get(TOKEN_VARIABLE)
    if value is not None and (refuse_empty or value.strip()):
        tokens[TOKEN_VARIABLE] = _checked(value, TOKEN_VARIABLE)
    if not tokens:
        return None
    (where, token), *others = tokens.items()
    for other, value in others:
        if value != token:
            found = f"it holds another token than {other}"
            raise ContractError(where, found, "Give one of the two")
    return token


def _read(path: Path, where: str) -> str:
    """Return the token in a file. where: the option or variable that names it."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        found = f"{path} cannot be read ({reason})"
        raise ContractError(where, found, "Name a readable text file") from None
    return _checked(content, where)


def _checked(text: str, where: str) -> str:
    """Return the token without surrounding white space; raises ContractError if it is invalid."""
    token = text.strip()
    if not token:
        do = "Write a token, such as 32 random characters"
        raise ContractError(where, "the token is empty", do)
    if not all("!" <= letter <= "~" for letter in token):
        found = "the token has white space or other characters that a header cannot have"
        raise ContractError(where, found, "Use letters and digits")
    return token
