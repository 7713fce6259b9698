"""The wire types against those of ms-swift (WIRE-01, WIRE-02)."""

import dataclasses
import importlib
from typing import Any

import pytest
from pydantic import ValidationError

from shared_contracts import infer as ours

MESSAGE = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def theirs() -> Any:
    """ms-swift's protocol module (seconds of imports)."""
    return importlib.import_module("swift.infer_engine.protocol")


@pytest.mark.req("WIRE-01")
def test_requests_have_the_same_fields_and_are_accepted_with_their_defaults(theirs: Any) -> None:
    for name in ("RolloutInferRequest", "RequestConfig"):
        fields = {field.name for field in dataclasses.fields(getattr(theirs, name))}
        assert set(getattr(ours, name).model_fields) == fields
    request = dataclasses.asdict(theirs.RolloutInferRequest(messages=[MESSAGE]))
    config = dataclasses.asdict(theirs.RequestConfig())
    rest = dict.fromkeys(("metrics", "template", "use_tqdm", "adapter_request"))
    call = {"infer_requests": [request], "request_config": config} | rest
    ours.InferCall.model_validate(call)
    actual = ours.RequestConfig().model_dump()
    assert {name: value or None for name, value in actual.items()} == {
        name: value or None for name, value in config.items()
    }


@pytest.mark.req("WIRE-02")
def test_fields_of_answers_are_among_theirs(theirs: Any) -> None:
    for model, other in (
        (ours.ChatCompletionResponse, theirs.ChatCompletionResponse),
        (ours.Choice, theirs.ChatCompletionResponseChoice),
        (ours.ChatMessage, theirs.ChatMessage),
        (ours.Usage, theirs.UsageInfo),
    ):
        assert set(model.model_fields) <= {field.name for field in dataclasses.fields(other)}


@pytest.mark.req("WIRE-01")
def test_unserved_fields_are_refused_by_name() -> None:
    configs: dict[str, Any] = {"num_beams": 2, "stream": True, "structured_outputs_regex": "a*"}
    for field, value in {"videos": ["a.mp4"], "objects": {"bbox": []}}.items():
        with pytest.raises(ValidationError, match=f"field '{field}' is not served"):
            ours.RolloutInferRequest.model_validate({"messages": [MESSAGE], field: value})
    for field, value in configs.items():
        with pytest.raises(ValidationError, match=f"field '{field}' is not served"):
            ours.RequestConfig.model_validate({field: value})
    with pytest.raises(ValidationError, match="add_eos"):
        ours.RolloutInferRequest.model_validate({"messages": [MESSAGE], "add_eos": True})
    with pytest.raises(ValidationError, match="adapter_request"):
        ours.InferCall.model_validate({"infer_requests": [], "adapter_request": {"name": "a"}})


@pytest.mark.req("LOGP-01")
def test_log_probability_is_a_number_of_json() -> None:
    values = [-0.25, 0.0, 1e-7, float("-inf"), float("nan"), -20000.0]
    least = ours.LEAST_LOGPROB
    content = ours.ChoiceLogprobs.of(values).model_dump()["content"]
    assert [each["logprob"] for each in content] == [-0.25, 0.0, 0.0, least, least, least]
    with pytest.raises(ValidationError):
        ours.TokenLogprob(logprob=0.5)
