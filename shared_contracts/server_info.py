"""Answers of the server's probes (WIRE-06), and the token that calls carry."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.weights import Count, Transport, WeightState, Wire

# The environment variable in which both programs look for the server's token.
TOKEN_VARIABLE = "ROLLOUT_SERVER_TOKEN"
# The one that names a file of it, as the secrets of containers and services are files.
TOKEN_FILE_VARIABLE = "ROLLOUT_SERVER_TOKEN_FILE"

# serving       answers calls
# starting      its engine is being built, for the first time or again
# needs-push    built again with the checkpoint's weights, which are no longer the current ones
# asleep        its memory is given up, until a push or `/wake_up/`
# dead          its engine is gone; it will be built again
ReplicaState = Literal["serving", "starting", "needs-push", "asleep", "dead"]

Workers = Annotated[int, Field(ge=1, le=2**20)]


def process_of(server_epoch: str) -> str:
    """The part of an epoch that changes only with the server's process.

    An epoch is that, a dash, and how many replicas the process has lost.
    """
    return server_epoch.rpartition("-")[0]


class ReplicaStatus(Wire):
    """The state of one replica.

    detail: why it does not serve; empty where it does.
    heartbeat_age_s: seconds since the engine's loop last answered; null without an engine.
    restarts: how often the engine was built again.
    """

    index: Count
    state: ReplicaState
    detail: str
    heartbeat_age_s: float | None
    restarts: Count


class Health(Wire):
    """`GET /health/`: 200 when every replica can answer `/infer/`, if need be after a push."""

    status: Literal["ok"] = "ok"
    state: WeightState
    weights_version: Count
    server_epoch: str
    replicas: list[ReplicaStatus]


class Live(Wire):
    """`GET /live/`: the event loop runs; seconds since each engine last made progress."""

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
    """`GET /info/`: what this server is. Answered while engines start, too.

    world_size: engine workers over all replicas.
    max_model_len: tokens of a context; null until an engine has told.
    enable_lora: an adapter may be pushed instead of full weights.
    enable_prefix_caching: the engines reuse the caches of equal prompts; null: not reported.
    server_epoch: changes when the server was started anew, or one of its replicas was lost.
    owner: the learner that pushes to this server; null before one came and after it has left.
    host: name of the server's machine. gpus: their ids there; none on a CPU or where Ray places.
    gpu_uuids: of the same GPUs, where nvidia-smi told them at the start.
    versions: of this server and of what it stands on, by distribution name.
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
    """Read the token of calls: from `option` (`token_file`), or from either variable.

    refuse_empty: a variable that is set to nothing is an error; else it counts as not set.

    None where nothing gives one. Raises ContractError for a token that no header can carry, a
    file that cannot be read, and two tokens that differ.
    """
    found = {
        where: _read(path, where) for where, path in given_token_files(environment, option).items()
    }
    written = environment.get(TOKEN_VARIABLE)
    if written is not None and (refuse_empty or written.strip()):
        found[TOKEN_VARIABLE] = _checked(written, TOKEN_VARIABLE)
    if not found:
        return None
    (where, token), *others = found.items()
    for other, value in others:
        if value != token:
            raise ContractError(
                where, f"it holds another token than {other}", "Give one of the two"
            )
    return token


def given_token_files(environment: Mapping[str, str], option: Path | None) -> dict[str, Path]:
    """The files that hold a token, by what names them."""
    files = {} if option is None else {"token_file": option}
    if path := environment.get(TOKEN_FILE_VARIABLE):
        files[TOKEN_FILE_VARIABLE] = Path(path)
    return files


def _read(path: Path, where: str) -> str:
    """The token in `path`. where: the option or variable that names the file."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ContractError(
            where, f"{path} cannot be read ({reason})", "Name a readable text file"
        ) from None
    return _checked(content, where)


def _checked(text: str, where: str) -> str:
    """`text` without white space around it; raises ContractError for what is no token."""
    token = text.strip()
    if not token:
        raise ContractError(
            where, "the token is empty", "Write a token, such as 32 random characters"
        )
    if not all("!" <= letter <= "~" for letter in token):
        found = "the token has white space or other characters that a header cannot have"
        raise ContractError(where, found, "Use letters and digits")
    return token
