"""The repeat guard's settings in environment variables, and the choice of its sentinel."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from learner.models.toy import make_toy_tokenizer
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.engines.vllm.repeat_processor import choose_sentinel
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.repeat_config import (
    CONFIG_JSON,
    CONFIG_JSON_PATH,
    INJECTION,
    repeat_config_from_environment,
    repeat_environment,
)
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import RepeatTerminateConfig

CONFIG = RepeatTerminateConfig(
    enabled=True, min_new_tokens=3, ngram_size=4, ngram_repeats=2, max_object_keys=9
)


@pytest.mark.req("REP-04")
def test_what_is_written_to_the_environment_is_read_from_it() -> None:
    assert repeat_config_from_environment(repeat_environment(CONFIG)) == CONFIG
    assert repeat_config_from_environment(repeat_environment(RepeatTerminateConfig())) is None


@pytest.mark.req("REP-04")
def test_the_file_wins_over_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    path.write_text('{"enabled": true, "ngram_size": 7}')
    environ = repeat_environment(CONFIG) | {CONFIG_JSON_PATH: str(path)}
    read = repeat_config_from_environment(environ)
    assert read == RepeatTerminateConfig(enabled=True, ngram_size=7)


@pytest.mark.req("REP-04")
@pytest.mark.parametrize("switch", [{}, {INJECTION: ""}, {INJECTION: "0"}])
def test_settings_without_the_switch_are_not_read(switch: dict[str, str]) -> None:
    assert repeat_config_from_environment({CONFIG_JSON: "{"} | switch) is None


@pytest.mark.req("REP-04")
@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({INJECTION: "yes"}, INJECTION),
        ({}, CONFIG_JSON),
        ({CONFIG_JSON: "{"}, CONFIG_JSON),
        ({CONFIG_JSON: "[]"}, CONFIG_JSON),
        ({CONFIG_JSON: '{"ngram_repeats": 1}'}, f"{CONFIG_JSON}.ngram_repeats"),
        ({CONFIG_JSON: '{"no_repeat_ngram": 3}'}, f"{CONFIG_JSON}.no_repeat_ngram"),
        ({CONFIG_JSON: "{}", CONFIG_JSON_PATH: "missing.json"}, CONFIG_JSON_PATH),
    ],
)
def test_a_wrong_variable_is_refused_by_name(variables: dict[str, str], where: str) -> None:
    with pytest.raises(ContractError) as caught:
        repeat_config_from_environment({INJECTION: "1"} | variables)
    assert caught.value.where == where


@pytest.mark.req("REP-04")
def test_the_engine_inherits_no_guard_of_the_environment(tmp_path: Path) -> None:
    def engine_config(**guard: Any) -> RepeatTerminateConfig | None:
        settings = ServerSettings(
            model=tmp_path, device="cpu", repeat_terminate=RepeatTerminateConfig(**guard)
        )
        stale = {INJECTION: "1", CONFIG_JSON: "{", CONFIG_JSON_PATH: "stale.json"}
        return repeat_config_from_environment(stale | engine_environment(settings))

    assert engine_config() is None
    assert engine_config(enabled=True, max_object_keys=5) == RepeatTerminateConfig(
        enabled=True, max_object_keys=5
    )


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
