"""The repeat guard's settings in environment variables, and the choice of its sentinel."""

import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from learner.models.toy import make_toy_tokenizer
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.engines.vllm.repeat_processor import active_sentinel, choose_sentinel
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.repeat_config import (
    CONFIG_JSON,
    CONFIG_JSON_PATH,
    INJECTION,
    repeat_config_from_environment,
)
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import RepeatTerminateConfig

CONFIG = RepeatTerminateConfig(
    enabled=True, min_new_tokens=3, ngram_size=4, ngram_repeats=2, max_object_keys=9
)
ON, OFF = '{"enabled": true, "ngram_size": 7}', '{"ngram_size": 7}'
SEVEN = RepeatTerminateConfig(enabled=True, ngram_size=7)


@pytest.mark.req("REP-04")
@pytest.mark.parametrize("config", [CONFIG, RepeatTerminateConfig()], ids=["on", "off"])
def test_settings_written_to_the_environment_are_read_from_it(
    tmp_path: Path, config: RepeatTerminateConfig
) -> None:
    """The engine's variables replace inherited ones; only the guard selects the runner V1."""
    settings = ServerSettings(model=tmp_path, device="cpu", repeat_terminate=config)
    written = engine_environment(settings)
    stale = {INJECTION: "0", CONFIG_JSON: "{", CONFIG_JSON_PATH: "stale.json"}
    assert repeat_config_from_environment(stale | written) == config
    assert written.get("VLLM_USE_V2_MODEL_RUNNER") == ("0" if config.enabled else None)


@pytest.mark.req("REP-04")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({INJECTION: "0"}, None),
        ({CONFIG_JSON: ON, INJECTION: ""}, SEVEN),
        ({CONFIG_JSON: ON, INJECTION: "1"}, SEVEN),
        ({CONFIG_JSON: OFF, INJECTION: "0"}, RepeatTerminateConfig(ngram_size=7)),
        ({CONFIG_JSON: "{", CONFIG_JSON_PATH: "guard.json"}, SEVEN),  # the path wins
    ],
)
def test_enabled_in_the_settings_decides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    expected: RepeatTerminateConfig | None,
) -> None:
    (tmp_path / "guard.json").write_text(ON)
    monkeypatch.chdir(tmp_path)
    assert repeat_config_from_environment(variables) == expected


@pytest.mark.req("REP-04")
@pytest.mark.parametrize(
    ("variables", "where", "found"),
    [
        ({CONFIG_JSON: ON, INJECTION: "0"}, INJECTION, f"it is 0 and {CONFIG_JSON} has enabled"),
        ({INJECTION: "yes"}, INJECTION, '"yes" is not accepted'),
        ({INJECTION: "1"}, CONFIG_JSON, "it is not set"),
        ({CONFIG_JSON: "{"}, CONFIG_JSON, "it is not JSON"),
        ({CONFIG_JSON: "[]"}, CONFIG_JSON, "[] is not a mapping"),
        ({CONFIG_JSON: '{"ngram_repeats": 1}'}, f"{CONFIG_JSON}.ngram_repeats", "1 is not"),
        ({CONFIG_JSON: ON, CONFIG_JSON_PATH: "gone.json"}, CONFIG_JSON_PATH, "gone.json cannot"),
        ({CONFIG_JSON: ON, CONFIG_JSON_PATH: os.devnull}, CONFIG_JSON_PATH, "it is not JSON"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(
    variables: dict[str, str], where: str, found: str
) -> None:
    with pytest.raises(ContractError) as caught:
        repeat_config_from_environment(variables)
    assert caught.value.where == where
    assert found in caught.value.found


def tokenizer_with(*tokens: str) -> PreTrainedTokenizerFast:
    """The toy's: every id is used, and `<|video_pad|>` is its one reserved token but for these."""
    tokenizer = make_toy_tokenizer()
    special = [AddedToken(token, special=True) for token in tokens]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


@pytest.mark.req("REP-05")
def test_the_sentinel_is_the_highest_free_id_or_else_a_reserved_token() -> None:
    tokenizer = tokenizer_with()
    assert choose_sentinel(tokenizer, len(tokenizer) + 64) == len(tokenizer) + 63
    video_pad = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert choose_sentinel(tokenizer, len(tokenizer)) == video_pad
    tokenizer = tokenizer_with("<|file_sep|>", "<|fim_pad|>")
    fim_pad = tokenizer.convert_tokens_to_ids("<|fim_pad|>")
    assert choose_sentinel(tokenizer, len(tokenizer)) == fim_pad


@pytest.mark.req("REP-05")
@pytest.mark.parametrize("use", ["chat_template", "eos_token", "pad_token", "bos_token"])
def test_a_token_in_use_is_no_sentinel(use: str) -> None:
    tokenizer = tokenizer_with()
    setattr(tokenizer, use, "<|video_pad|>")
    assert choose_sentinel(tokenizer, len(tokenizer)) is None


@pytest.mark.req("REP-05", "REP-06")
@pytest.mark.parametrize(
    ("report", "found"),
    [
        (None, "worker 1 has no such logits processor"),
        ({"config": CONFIG.model_dump() | {"ngram_size": 9}, "sentinel": 7}, "'ngram_size': 9"),
        ({"config": CONFIG.model_dump(), "sentinel": None}, "no id left for the sentinel"),
    ],
)
def test_a_guard_is_active_if_every_worker_of_the_engine_has_it(
    report: dict[str, Any] | None, found: str
) -> None:
    good = {"config": CONFIG.model_dump(), "sentinel": 7}
    assert active_sentinel(CONFIG, [good, good]) == 7
    with pytest.raises(ContractError, match=found):
        active_sentinel(CONFIG, [good, report])
