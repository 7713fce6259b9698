"""`learner export`: write a checkpoint of a run as a verified plain model (RUN-01).

    checkpoint (full, or an adapter) -> merged weights and processor -> a new folder,
           in a form that transformers 4.57 reads, too
        -> loaded again by transformers: logits within 1e-3
        -> served by vLLM: log-probabilities within the bound of `ProofOfEffect`
        -> published, with a model card
        -> pushed to the Hub, with `--push-to-hub`

The state to resume a run, such as the optimizer, is not exported.
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin
from transformers.utils.logging import disable_progress_bar

from learner.config.schema import Config
from learner.config.yaml12 import read_mapping
from learner.data.checkpoint import Checkpoint
from learner.models.families import family_of
from learner.models.load import LoadedModel, read_model, read_processor
from learner.models.loading import loading
from learner.models.prompts import encode_request
from learner.models.published import PROCESSOR_FILES, TOKENIZER_FILES, write_published_form
from learner.operate.eval_plan import require_whole
from learner.operate.model_card import write_model_card
from learner.rollout.client import RolloutClient
from learner.rollout.hf import evaluating
from learner.rollout.server_process import ServerProcess
from learner.rollout.sync.probe import ProofOfEffect, probe_call, prompts
from learner.runs.atomic_files import publish_directory, require_free
from learner.runs.checkpoint import newest_checkpoint
from learner.runs.hub import push_folder
from learner.runs.run_folder import RESOLVED
from shared_contracts.adapters import ADAPTER
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
