"""How an update is opened in the workers: what comes is held against what they have.

admit_update(on_all, body, dtype)
    full weights    the layers are made loadable; the manifest must fit them
    an adapter      the layers are left alone; each worker must be able to serve it, and
                    where the learner says what its base is, must hold that base
    a trial         the layers are left alone; each worker must hold the base already
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from rollout_server.engines.engine_protocol import EngineCall, worker_phase
from rollout_server.engines.verification import (
    Difference,
    Fault,
    adapter_refused,
    differ,
    differences,
    mismatch,
    unknown_digests,
)
from shared_contracts.errors import ProblemError
from shared_contracts.weights import AdapterBase, DtypeName, ParameterMeta, StartWeightUpdate

# Runs a phase on every engine: what each worker of each engine answered.
OnAll: TypeAlias = Callable[[str, EngineCall[list[Any]]], Awaitable[list[list[Any]]]]


def unfit_base(body: StartWeightUpdate) -> str | None:
    """What is wrong with the base that `body` brings; None when nothing is."""
    if body.base is None:
        return (
            "a trial needs a base: the weights that the engines should hold" if body.trial else None
        )
    if body.adapter is None and not body.trial:
        return "a base was given without an adapter"
    return unknown_digests(body.base.digests, _by_name(body.base.parameters))


async def admit_update(
    on_all: OnAll, body: StartWeightUpdate, dtype: DtypeName
) -> ProblemError | None:
    """Make every worker ready for what comes; the problem of what cannot be loaded.

    With a problem, the update is to be abandoned; no weight has changed then.
    """
    if body.trial:
        return await _open_trial(on_all, body, dtype)
    return await (
        _open_full(on_all, body, dtype)
        if body.adapter is None
        else _open_adapter(on_all, body, dtype)
    )


async def _open_full(
    on_all: OnAll, body: StartWeightUpdate, dtype: DtypeName
) -> ProblemError | None:
    call = worker_phase("open_weight_update", parameters=_plain(body.parameters), dtype=dtype)
    answers = await on_all("start", call)
    faults = [Fault(**fault) for engine in answers for worker in engine for fault in worker]
    return mismatch(faults) if faults else None


async def _open_adapter(
    on_all: OnAll, body: StartWeightUpdate, dtype: DtypeName
) -> ProblemError | None:
    assert body.adapter is not None
    arguments = {"adapter": body.adapter.model_dump(), "parameters": _plain(body.parameters)}
    answers = await on_all("start: adapter", worker_phase("adapter_faults", **arguments))
    faults = [fault for engine in answers for worker in engine for fault in worker]
    if not faults and body.base is not None:
        faults = await _base_faults(on_all, body.base, dtype)
    if faults:
        return adapter_refused(faults)
    await on_all("start", worker_phase("open_adapter_update", **arguments))
    return None


async def _open_trial(
    on_all: OnAll, body: StartWeightUpdate, dtype: DtypeName
) -> ProblemError | None:
    assert body.base is not None
    faults, wrong = await _compared(on_all, body.base, dtype)
    if faults:
        return mismatch(faults)
    if wrong:
        return differ(wrong, len(body.base.digests), "base")
    await on_all("start", worker_phase("open_trial", parameters=_plain(body.parameters)))
    return None


async def _base_faults(on_all: OnAll, base: AdapterBase, dtype: DtypeName) -> list[str]:
    """Where the engines hold anything but the learner's base; its shape comes before values."""
    faults, wrong = await _compared(on_all, base, dtype)
    found = [(fault.name, fault.detail) for fault in faults]
    found += [(each.name, f"replica {each.replica}: {each.detail}") for each in wrong]
    return [
        f"the engines' weights are not the learner's base: {name}: {detail}"
        for name, detail in found
    ]


async def _compared(
    on_all: OnAll, base: AdapterBase, dtype: DtypeName
) -> tuple[list[Fault], list[Difference]]:
    """Faults of the manifest of a base and, without any, where the engines hold other values."""
    asked = [(digest.name, digest.columns) for digest in base.digests]
    call = worker_phase("check_base", parameters=_plain(base.parameters), dtype=dtype, asked=asked)
    answers = await on_all("start: base", call)
    faults = [Fault(**fault) for engine in answers for found, _ in engine for fault in found]
    wrong: list[Difference] = []
    for replica, engine in enumerate(answers if not faults else ()):
        held = [parts for _, parts in engine]
        wrong += differences(replica, base.digests, _by_name(base.parameters), held)
    return faults, wrong


def _plain(parameters: list[ParameterMeta]) -> list[dict[str, Any]]:
    return [parameter.model_dump() for parameter in parameters]


def _by_name(parameters: list[ParameterMeta]) -> dict[str, ParameterMeta]:
    return {parameter.name: parameter for parameter in parameters}
