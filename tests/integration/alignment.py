"""Whether the answers a run has logged line up, id by id, with what its learner teaches."""

from pathlib import Path

from learner.config.schema import Config
from learner.models.load import load_model
from learner.models.prompts import PromptEncoder
from learner.runs.rollout_log import StepAnswer
from learner.stages.formats.coord_json import parse_rollout


def logged_answers(folder: Path) -> list[StepAnswer]:
    """All answers of a run, in order. folder: of the run."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [StepAnswer.model_validate_json(line) for line in lines]


def check_alignment(config: Config, answers: list[StepAnswer]) -> None:
    """Prompts have the ids that the learner encodes; each target begins as its answer was read."""
    loaded = load_model(config)
    encode = PromptEncoder(loaded.processor, config.template.prompt, config.template.system)
    for answer in answers:
        assert answer.prompt_token_ids == encode(answer.sample).ids.tolist()
        parsed = parse_rollout(answer.response_token_ids, loaded.tokenizer, allow_poly=False)
        assert answer.target is not None
        kept = answer.target.token_ids(answer.response_token_ids)[: answer.target.prefix_len]
        assert kept == parsed.prefix_token_ids
