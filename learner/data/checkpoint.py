"""The files of a checkpoint (config, tokenizer, chat template, names of tensors), and the token
counts of samples for it. Imports no torch.

Every program of the learner reads a checkpoint folder through `Checkpoint`. transformers loads the
model (`learner.models.load`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from learner.config.registry import model_family
from learner.data.images import ImageInfo, ImageRule, image_problems, inspect_image
from learner.data.jsonl import build_request
from learner.stages.tokens import COORD_BINS, IM_END, coord_token, split_newlines
from learner.types import GroundTruthObject, Sample
from shared_contracts.checkpoints import checkpoint_chain
from shared_contracts.errors import ContractError

TOKENIZER = "tokenizer.json"
_SAVED = "Give the folder of a checkpoint saved with its processor"


@dataclass(frozen=True)
class Checkpoint:
    """The folder of a checkpoint, or of an adapter over one.

    where: the config key or the option that named it, for errors. All properties raise
    ContractError for files that are missing or cannot be read.
    """

    folder: Path
    where: str = "model.model"

    @cached_property
    def chain(self) -> list[Path]:
        """The folder, its base checkpoint, and so on; the last is no adapter."""
        return checkpoint_chain(self.folder, self.where)

    @property
    def base(self) -> Path:
        return self.chain[-1]

    @property
    def processor(self) -> Path:
        """The folder of the processor: the first of `chain` that has a tokenizer."""
        return next((each for each in self.chain if (each / TOKENIZER).is_file()), self.folder)

    @property
    def family(self) -> Any:
        return model_family(read_json(self.base / "config.json").get("model_type"), self.where)

    @property
    def image_rule(self) -> ImageRule:
        """The rule of the processor, which must fit the family."""
        rule: ImageRule = self.family.image_rule(self.processor)
        return rule

    @cached_property
    def tokenizer(self) -> Tokenizer:
        file = self.processor / TOKENIZER
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises Exception itself
            raise ContractError(
                str(file), f"it is no tokenizer ({error})", "Save the checkpoint's tokenizer again."
            ) from error

    @property
    def coordinate_ids(self) -> list[int | None]:
        """The ids of the coordinate tokens in the order of the bins; None where one is missing."""
        return [self.tokenizer.token_to_id(coord_token(k)) for k in range(COORD_BINS)]

    def chat_template(self) -> str:
        alone = self.processor / "chat_template.jinja"
        if alone.is_file():
            return alone.read_text(encoding="utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            file = self.processor / name
            template = read_json(file).get("chat_template") if file.is_file() else None
            if isinstance(template, str):
                return template
        raise ContractError(
            str(self.processor),
            f"it has no chat template as text in {alone.name} or tokenizer_config.json",
            _SAVED,
        )

    def tensor_names(self) -> Iterator[str]:
        """Yield the names in `model*.safetensors` of the folder; broken files have none."""
        for file in sorted(self.folder.glob("model*.safetensors")):
            with suppress(OSError, SafetensorError), safe_open(file, "numpy") as tensors:
                yield from tensors.keys()

    def require_vocabulary(self) -> None:
        """Require a config, a chat template, and a tokenizer with the tokens of all answers.

        Raises ContractError, which names what is missing.
        """
        if not self.folder.is_dir():
            do = "Give the folder of a checkpoint, or download one into it: "
            do += f"hf download OWNER/NAME --local-dir {self.folder}"
            raise ContractError(self.where, f"there is no folder {self.folder}", do)
        for name, holder in {"config.json": self.base, TOKENIZER: self.processor}.items():
            if not (holder / name).is_file():
                raise ContractError(self.where, f"{self.folder} has no {name}", _SAVED)
        if self.tokenizer.token_to_id(IM_END) is None:
            raise ContractError(
                self.where,
                f"the tokenizer of {self.folder} has no token {IM_END}",
                "Use a model of the Qwen-VL family, whose turns end with it",
            )
        missing = [k for k, known in enumerate(self.coordinate_ids) if known is None]
        if missing:
            raise ContractError(
                self.where,
                f"the tokenizer of {self.folder} lacks {len(missing)} of the {COORD_BINS} "
                f"coordinate tokens, first {coord_token(missing[0])}",
                "Add them with `learner toy make-model --expand-vocab SOURCE --out FOLDER`",
            )
        self.chat_template()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises ContractError for other content."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContractError(str(path), f"cannot be read ({error})", "Correct the file") from error
    if not isinstance(value, dict):
        raise ContractError(str(path), "it holds no JSON object", "Correct the file")
    return value


WriteAnswer = Callable[[Sequence[GroundTruthObject]], str]


class TokenLimits(NamedTuple):
    """answer: `rollout_matching.max_new_tokens`. pack: `global_max_length`; None: no packing."""

    answer: int
    pack: int | None


class SampleLengths:
    """Token counts of samples for one checkpoint and one prompt.

    write_answer: returns the target text of objects.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        write_answer: WriteAnswer,
        prompt: str,
        system: str | None,
        limits: TokenLimits,
    ) -> None:
        self.limits = limits
        self._tokenizer = checkpoint.tokenizer
        self.rule = checkpoint.image_rule
        self._placeholder = checkpoint.family.placeholder
        self._template = checkpoint.chat_template()
        self._write_answer = write_answer
        self._prompt, self._system = prompt, system
        self._text_tokens: dict[int, int] = {}

    def target(self, sample: Sample) -> int:
        """Return the tokens of the answer with every object, EOS included."""
        parts = split_newlines(self._write_answer(sample.objects))
        encodings = self._tokenizer.encode_batch(parts, add_special_tokens=False)
        return sum(len(each.ids) for each in encodings) + 1

    def images(self, sample: Sample) -> int:
        """Return the image tokens; the size of the first image is that of the line.

        Raises DataProblem for an image that is too narrow for the processor, and for another image
        that cannot be opened.
        """
        results = {path: inspect_image(path) for path in sample.images[1:]}
        results[sample.images[0]] = ImageInfo((sample.width, sample.height), reoriented=False)
        for problem in image_problems(sample, results, self.rule):
            raise problem
        found = [results[path] for path in sample.images]
        return sum(self.rule.tokens(*r.size) or 0 for r in found if isinstance(r, ImageInfo))

    def prompt(self, sample: Sample) -> int:
        """Return the prompt tokens, image tokens included; raises as `images` does."""
        count = len(sample.images)
        if count not in self._text_tokens:
            from transformers.utils.chat_template_utils import render_jinja_template  # takes 1 s

            messages = build_request(sample, self._prompt, self._system).messages
            rendered: Any = render_jinja_template(
                [[message.model_dump(exclude_none=True) for message in messages]],
                chat_template=self._template,
                add_generation_prompt=True,
            )
            text = str(rendered[0][0])
            tokens = len(self._tokenizer.encode(text).ids) - text.count(self._placeholder)
            self._text_tokens[count] = tokens  # without image tokens
        return self._text_tokens[count] + self.images(sample)
