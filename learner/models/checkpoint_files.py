"""The files of a checkpoint: errors when it is loaded, and the published form of Qwen-VL.

transformers 5 saves names that transformers 4.57 does not read. Both read the published names:

    tokenizer_config.json                  no tokenizer class of transformers 5 alone
    preprocessor_config.json and
    video_preprocessor_config.json         in place of processor_config.json
    config.json                            rope_theta, rope_scaling, num_experts; that of Qwen3.5,
                                           which 4.57 does not know, is as transformers 5 saves it

Files of a published checkpoint that did not change are copied instead, byte for byte.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

from learner.data.checkpoint import read_json
from shared_contracts.errors import ContractError

# What transformers raises for an incomplete or wrong checkpoint folder.
_OF_THE_FOLDER = (OSError, ValueError, RuntimeError, ImportError, SafetensorError)


@contextmanager
def loading(where: str, what: str, fix: str) -> Iterator[None]:
    """Raise ContractError if loading fails in the block.

    where: config key, option or path; what: name of the loaded thing; fix: what to do.
    """
    try:
        yield
    except _OF_THE_FOLDER as error:
        raise ContractError(where, f"{what} cannot be loaded ({error})", fix) from error


_PROCESSORS = {
    "image_processor": "preprocessor_config.json",
    "video_processor": "video_preprocessor_config.json",
}
PROCESSOR_FILES = (*_PROCESSORS.values(), "generation_config.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.json", "chat_template.jinja"),
)


class _TransposedInFiles(Transpose):
    """When loading, transposes matrices of another shape; when saving, all.

    Published checkpoints of Qwen3-VL with experts have transposed matrices of experts, which
    engines expect. transformers' own conversion never transposes when it saves.
    """

    @property
    def reverse_op(self) -> ConversionOps:
        return Transpose(self.dim1, self.dim0)


register_checkpoint_conversion_mapping(
    "qwen3_vl_moe",
    [
        WeightConverter(name, name, [_TransposedInFiles(1, 2, check_dims=True)])
        for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    ],
    overwrite=True,
)


def write_published_form(
    folder: Path, source: Path | None = None, unchanged: Sequence[str] = ()
) -> None:
    """Rewrite the JSON files of a folder of `save_pretrained`.

    source: the checkpoint that the files named `unchanged` come from. They are copied if its
    processor has the published form.
    """
    nested = folder / "processor_config.json"
    if source is not None and (source / PROCESSOR_FILES[0]).is_file():
        for name in unchanged:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        nested.unlink(missing_ok=True)
    for name, change in (("tokenizer_config.json", _tokenizer), ("config.json", _config)):
        settings = read_json(folder / name)
        change(settings)
        if settings != read_json(folder / name):
            _write(folder / name, settings)
    if nested.is_file():
        settings = read_json(nested)
        for part, name in _PROCESSORS.items():
            if part in settings:
                own = settings[part] | {"processor_class": settings["processor_class"]}
                _write(folder / name, own)
        nested.unlink()


def _write(file: Path, settings: dict[str, Any]) -> None:
    text = json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True)
    file.write_text(f"{text}\n", encoding="utf-8")


def _tokenizer(settings: dict[str, Any]) -> None:
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")


def _config(settings: dict[str, Any]) -> None:
    if str(settings.get("model_type")).startswith("qwen3_5"):
        return
    settings.get("vision_config", {}).pop("rope_parameters", None)  # not in 4.57
    for section in (settings, settings.get("text_config", {})):
        rope = section.get("rope_parameters")
        if isinstance(rope, dict) and "rope_theta" in rope:
            section["rope_theta"] = rope.pop("rope_theta")
            section["rope_scaling"] = section.pop("rope_parameters")
        if "num_local_experts" in section:
            section["num_experts"] = section.pop("num_local_experts")
