"""The model card of an exported checkpoint, written from the files of its run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from learner.config.yaml12 import dump_mapping, read_mapping
from learner.runs.checkpoint import MANIFEST, SavedCheckpoint, read_checkpoint
from learner.runs.resume import data_digest
from learner.runs.run_folder import RESOLVED, RUN, RunFolder


def write_model_card(checkpoint: Path, folder: Path) -> None:
    """Write `README.md` into the folder of an exported model, if a run made the checkpoint."""
    run = checkpoint.absolute().parent
    if not all(file.is_file() for file in (run / RUN, run / RESOLVED, checkpoint / MANIFEST)):
        return
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="image-text-to-text",
        tags=["object-detection", "rollmatch"],
    )
    text = "\n".join(_sections(RunFolder(run), read_checkpoint(checkpoint)))
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(folder / "README.md")


def _sections(run: RunFolder, checkpoint: SavedCheckpoint) -> Iterator[str]:
    config = read_mapping(run.path / RESOLVED)
    name = config["training"]["run_name"]
    yield f"# {name}\n"
    yield (
        "A vision-language detector, trained with Rollmatch. This is the model of "
        f"`{checkpoint.path.name}` of the run `{name}`.\n"
    )
    yield from _use(config)
    yield from _data(config, checkpoint.manifest.data_sha256)
    yield from _scores(run, checkpoint.manifest.step)
    yield "## Config\n"
    yield "Paths have their last part alone. Addresses of servers are left out.\n"
    config["rollout_matching"]["vllm"].pop("server", None)
    config["custom"].pop("extra", None)  # free content
    yield f"```yaml\n{dump_mapping(_public(config))}```\n"
    yield from _versions(run.facts())


def _use(config: Mapping[str, Any]) -> Iterator[str]:
    template, custom = config["template"], config["custom"]
    yield "## Use\n"
    yield (
        "Give the image, then this prompt. A coordinate `<|coord_k|>` is k/999 of the width or "
        f"the height. Answers have the format `{custom.get('answer_format', 'object_keys')}`.\n"
    )
    for part in ("system", "prompt"):
        if template.get(part):
            yield f"{part}:\n\n```text\n{template[part].rstrip()}\n```\n"


def _data(config: Mapping[str, Any], trained_on: str) -> Iterator[str]:
    """Yield a table of data files. trained_on: digest of the training data, as in the run."""
    yield "## Data\n"
    yield "| file | used for | SHA-256 |"
    yield "| --- | --- | --- |"
    files = (("train_jsonl", "training", trained_on), ("val_jsonl", "evaluation", None))
    for key, use, digest in files:
        if (name := config["data"].get(key)) is not None:
            if digest is None and Path(name).is_file():
                digest = data_digest(Path(name))
            yield f"| {Path(name).name} | {use} | {digest or 'not known'} |"
    yield ""


def _scores(run: RunFolder, step: int) -> Iterator[str]:
    """Yield the scores of the run's last evaluation up to the checkpoint, which is of `step`."""
    yield "## Scores\n"
    lines = [line for line in run.metrics() if "eval/f1" in line and line["step"] <= step]
    if not lines:
        yield "The run has not evaluated this model.\n"
        return
    yield f"The last evaluation of the run, after step {lines[-1]['step']}:\n"
    yield "| metric | value |"
    yield "| --- | --- |"
    for name, value in lines[-1].items():
        if name.startswith("eval/"):
            shown = "none" if value is None else f"{value:.4g}"
            yield f"| {name.removeprefix('eval/')} | {shown} |"
    yield ""


def _versions(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "## Versions\n"
    versions = {"python": facts["python"], **facts["versions"]}
    yield from (f"- {name} {number}" for name, number in versions.items())
    if facts.get("commit"):
        yield f"- commit {facts['commit']} of Rollmatch"
    yield ""


def _public(value: Any) -> Any:
    """Return a part of a config with file names instead of paths."""
    if isinstance(value, dict):
        return {key: _public(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_public(each) for each in value]
    is_path = isinstance(value, str) and value.startswith("/") and "\n" not in value
    return Path(value).name if is_path else value
