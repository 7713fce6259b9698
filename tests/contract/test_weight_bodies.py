"""Bodies of weight updates that no worker could take are refused before anything happens."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from shared_contracts.weights import (
    AdapterMeta,
    FinishWeightUpdate,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    UpdateWeights,
)

PARAMETER = {"name": "a", "dtype": "float32", "shape": [2, 3]}
START = {"version": 1, "parameters": [PARAMETER], "attempt": None}
UPDATE = {"version": 1, "attempt": None}
INIT = {"host": "127.0.0.1", "port": 6000, "world_size": 2, "attempt": "a"}
ADAPTER = {"r": 8, "lora_alpha": 16.0, "target_modules": ["q_proj"]}

SOUND: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ParameterMeta, PARAMETER | {"shape": []}),
    (ParameterMeta, PARAMETER | {"shape": [0, 2**62]}),
    (ParameterMeta, PARAMETER | {"shape": [1] * 16}),
    (StartWeightUpdate, START | {"version": 2**62}),
    (AdapterMeta, ADAPTER | {"r": 512}),
    (UpdateWeights, UPDATE),
    (FinishWeightUpdate, UPDATE),
    (InitCommunicator, INIT),
]

UNSOUND: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ParameterMeta, PARAMETER | {"shape": [2**64]}),
    (ParameterMeta, PARAMETER | {"shape": [-1]}),
    (ParameterMeta, PARAMETER | {"shape": [2**30, 2**30]}),
    (ParameterMeta, PARAMETER | {"shape": [1] * 17}),
    (StartWeightUpdate, START | {"version": 2**64}),
    (UpdateWeights, UPDATE | {"version": 2**64}),
    (FinishWeightUpdate, UPDATE | {"version": 2**64}),
    (
        FinishWeightUpdate,
        UPDATE | {"digests": [{"name": "a", "columns": [2**64], "digest": "0" * 16}]},
    ),
    (InitCommunicator, INIT | {"bucket_bytes": 2**64}),
    (ParameterMeta, PARAMETER | {"name": "\ud800"}),
    (InitCommunicator, INIT | {"attempt": "\ud800"}),
    (FinishWeightUpdate, UPDATE | {"digests": [{"name": "\ud800", "digest": "0" * 16}]}),
    (AdapterMeta, ADAPTER | {"r": 2**64}),
    (AdapterMeta, ADAPTER | {"lora_alpha": float("inf")}),
    (AdapterMeta, ADAPTER | {"lora_alpha": float("nan")}),
]


@pytest.mark.req("SYNC-05", "WIRE-05")
@pytest.mark.parametrize(("body", "fields"), SOUND)
def test_what_can_be_counted_is_taken(body: type[BaseModel], fields: dict[str, Any]) -> None:
    body.model_validate(fields)


@pytest.mark.req("SYNC-05", "WIRE-05")
@pytest.mark.parametrize(("body", "fields"), UNSOUND)
def test_numbers_beyond_64_bits_and_what_is_no_number_or_text_are_refused(
    body: type[BaseModel], fields: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        body.model_validate(fields)
