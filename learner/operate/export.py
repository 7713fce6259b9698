"""`learner export`: write a checkpoint of a run as a verified plain model (RUN-01).

    checkpoint (full, or an adapter) -> merged weights and processor -> a new folder,
           in a form that transformers 4.57 reads, too
        -> loaded again by transformers: logits within 1e-3
        -> served by vLLM: log-probabilities within the bound of `ProofOfEffect`
        -> published, with a model card from the files of its run
        -> pushed to the Hub, with `--push-to-hub`

The state to resume a run, such as the optimizer, is not exported.
"""

import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin
from transformers.utils.logging import disable_progress_bar

from learner.config.schema import Config
from learner.config.yaml12 import dump_mapping, read_mapping
from learner.data.checkpoint import Checkpoint
from learner.models.checkpoint_files import (
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    loading,
    write_published_form,
)
from learner.models.families import family_of
from learner.models.load import LoadedModel, read_model, read_processor
from learner.models.prompts import encode_request
from learner.operate.eval_plan import require_whole
from learner.rollout.client import RolloutClient
from learner.rollout.hf import evaluating
from learner.rollout.server_process import ServerProcess
from learner.rollout.sync.probe import ProofOfEffect, probe_call, prompts
from learner.runs.atomic_files import publish_directory, require_free
from learner.runs.checkpoint import (
    MANIFEST,
    SavedCheckpoint,
    data_digest,
    newest_checkpoint,
    read_checkpoint,
)
from learner.runs.hub import push_folder
from learner.runs.run_folder import RESOLVED, RUN, RunFolder
from shared_contracts.checkpoints import ADAPTER
from shared_contracts.errors import ContractError, RunError
from shared_contracts.weights import DTYPE_BYTES, DtypeName

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Proof = Literal["all", "transformers"]
_START_S = 900.0
# Weights are bit-equal after reading; a forward may sum in another order.
_LOGITS = 1e-3


def require_exportable(checkpoint: Path, out: Path, verify: Proof) -> None:
    """Raise ContractError unless the checkpoint is whole, and can be verified and written."""
    require_free(out)
    require_whole(checkpoint, "CHECKPOINT")
    if not any((checkpoint / name).is_file() for name in ("config.json", ADAPTER)):
        raise ContractError(
            "CHECKPOINT",
            f"{checkpoint} has neither config.json nor {ADAPTER}",
            "Name the folder of a checkpoint, such as RUN/checkpoint-500",
        )
    if verify == "all" and find_spec("vllm") is None:
        raise ContractError(
            "--verify",
            "all, and vllm is not installed here",
            "Install it (the extra cpu or gpu), or give --verify transformers",
        )


def export(checkpoint: Path, out: Path, dtype: Dtype, verify: Proof) -> list[str]:
    """Write the model of a checkpoint to `out`; return the results of the verification.

    dtype: of the weights; `auto`: the checkpoint's own.

    Raises:
        ContractError: `checkpoint` cannot be loaded.
        RunError: the written model does not answer as the checkpoint; `out` is not created.
    """
    disable_progress_bar()
    with loading("CHECKPOINT", str(checkpoint), "Name a whole checkpoint of a Qwen3-VL"):
        model = read_model(checkpoint, "auto" if dtype == "auto" else getattr(torch, dtype))
        processor = read_processor(checkpoint)
    with publish_directory(out) as part:
        model.name_or_path = model.config.name_or_path = ""  # no path of this machine
        model.save_pretrained(part)
        processor.save_pretrained(part)
        source = _first_model(checkpoint, processor)
        write_published_form(part, source, (*PROCESSOR_FILES, *TOKENIZER_FILES))
        write_model_card(checkpoint, part)
        proofs = [_prove_by_transformers(model, processor, part)]
        if verify == "all":
            proofs.append(_prove_by_vllm(model, processor, part))
    return proofs


def _prove_by_transformers(model: PreTrainedModel, processor: ProcessorMixin, part: Path) -> str:
    again = read_model(part, "auto")
    if again.dtype != model.dtype:
        raise RunError(f"export: {model.dtype} was written, and {again.dtype} is read back")
    largest = 0.0
    for name in prompts():
        one, other = logits_of(model, processor, name), logits_of(again, read_processor(part), name)
        if one.shape != other.shape or not torch.allclose(one, other, atol=_LOGITS, rtol=_LOGITS):
            raise RunError(f"export: loaded again, its logits of the {name} prompt are others")
        largest = max(largest, float((one - other).abs().max()))
    return f"transformers loads it: logits within {largest:.3g} of the checkpoint's"


def logits_of(model: PreTrainedModel, processor: ProcessorMixin, name: str) -> Tensor:
    """Return the logits of every position of a probe's prompt; (L, V) float32."""
    prompt = encode_request(processor, prompts()[name])
    inputs: dict[str, Tensor | None] = {
        "input_ids": prompt.ids[None],
        **family_of(model).vision_inputs(prompt, prompt.mm_token_types[None]),
    }
    with evaluating(model):
        output = model(**{name: t for name, t in inputs.items() if t is not None}, use_cache=False)
    logits: Tensor = output.logits[0]
    return logits.float()


def _prove_by_vllm(model: PreTrainedModel, processor: ProcessorMixin, part: Path) -> str:
    device = "gpu" if torch.cuda.is_available() else "cpu"
    options = ["--model", str(part), "--device", device]
    if device == "gpu":
        options += ["--gpus", "0"]
    dtype: DtypeName = next(n for n in DTYPE_BYTES if getattr(torch, n) == model.dtype)
    proof = ProofOfEffect(LoadedModel(model, processor), "full")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "rollout_server.log"
        with ServerProcess(options, log) as server:
            server.wait_until_healthy(_START_S)
            answers = RolloutClient(server.base_url).infer(probe_call())
            difference = proof.check(server.base_url, answers, dtype)
    return f"vLLM serves it: log-probabilities differ by {difference:.2g} nats in the mean"


def _first_model(checkpoint: Path, processor: ProcessorMixin) -> Path:
    """Return the model that the runs up to a checkpoint began with; `checkpoint` outside of a run.

    It has the same tokenizer and processor: no run changes them. A folder that is gone, or that
    has another tokenizer now, ends the search.
    """
    folder, vocabulary = checkpoint, processor.tokenizer.get_vocab()
    while (config := folder.parent / RESOLVED).is_file():
        before = Path(read_mapping(config)["model"]["model"])
        if before.parent == folder.parent or not (before / "tokenizer.json").is_file():
            break
        if Checkpoint(before).tokenizer.get_vocab() != vocabulary:
            break
        folder = before
    return folder


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
    if isinstance(value, dict):
        return {key: _public(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_public(each) for each in value]
    is_path = isinstance(value, str) and value.startswith("/") and "\n" not in value
    return Path(value).name if is_path else value


def push_export(out: Path, repository: str, *, private: bool) -> str:
    """Push a folder of `export`; return the URL of the commit.

    Raises RunError with the command that pushes it again.
    """
    try:
        return push_folder(out, repository, private=private, message="Export of Rollmatch")
    except RunError as error:
        raise RunError(
            f"export: {error}. The model is in {out}; push it with `hf upload {repository} {out} .`"
        ) from error


def push_run(config: Config) -> str:
    """Push the model of a run's newest checkpoint to `training.hub_model_id`; return the URL.

    The model has the data type of `model.torch_dtype`. The run folder does not change.

    Raises RunError with the command that pushes it again.
    """
    training = config.training
    repository, folder = training.hub_model_id, Path(training.output_dir)
    newest = newest_checkpoint(folder)
    assert repository is not None, "checked with the config"
    assert newest is not None, "a run saves at its last step"
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".push-") as place:
            out = Path(place) / "model"
            export(newest.path, out, config.model.torch_dtype, "transformers")
            message = f"{training.run_name}, step {newest.manifest.step}"
            return push_folder(out, repository, private=training.hub_private_repo, message=message)
    except (ContractError, RunError, OSError) as error:
        raise RunError(
            f"the run has ended well, and its model was not pushed: {error}. Push it with `learner "
            f"export {newest.path} --out NEW --push-to-hub {repository}`"
        ) from error
