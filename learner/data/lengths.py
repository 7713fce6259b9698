"""Token counts of the prompt and the answer of a sample. Imports no torch.

The checkpoint supplies `tokenizer.json` and the chat template. An image placeholder counts as the
tokens of its image.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from learner.config.registry import model_family
from learner.data.images import inspect_header
from learner.data.jsonl import build_messages
from learner.stages.tokens import split_newlines
from learner.types import GroundTruthObject, Sample
from shared_contracts.adapters import checkpoint_chain, folder_with
from shared_contracts.errors import ContractError

WriteAnswer = Callable[[Sequence[GroundTruthObject]], str]


class ImageRule(Protocol):
    """Token counts of a model's image processor.

    max_aspect: the largest ratio of the sides that the processor accepts.
    """

    @property
    def max_aspect(self) -> int: ...

    def tokens(self, width: int, height: int) -> int | None:
        """Return the tokens of an image of this size in pixels; None if it is too narrow."""


def checkpoint_family(checkpoint: Path) -> Any:
    """Return the `learner.models.families.Family` of a checkpoint, or of an adapter's base."""
    folder = checkpoint_chain(checkpoint, "model.model")[-1]
    return model_family(read_json(folder / "config.json").get("model_type"))


def image_rule(checkpoint: Path) -> ImageRule:
    """Return the image rule of a checkpoint or adapter folder.

    Raises ContractError for a missing processor, or one that does not fit the model family.
    """
    processor = folder_with(checkpoint, "tokenizer.json", "model.model")
    rule: ImageRule = checkpoint_family(checkpoint).image_rule(processor)
    return rule


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
        checkpoint: Path,
        write_answer: WriteAnswer,
        prompt: str,
        system: str | None,
        limits: TokenLimits,
    ) -> None:
        self.limits = limits
        self._tokenizer = read_tokenizer(checkpoint / "tokenizer.json")
        self._rule = image_rule(checkpoint)
        self._placeholder = checkpoint_family(checkpoint).placeholder
        self._template = chat_template(checkpoint)
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

        Raises ContractError for an image that is too narrow for the processor, and
        UnreadableImage for another image that cannot be opened.
        """
        others = (inspect_header(path).size for path in sample.images[1:])
        count = 0
        for width, height in ((sample.width, sample.height), *others):
            if (tokens := self._rule.tokens(width, height)) is None:
                raise ContractError(
                    sample.sample_id,
                    f"an image of {width}x{height} pixels: longer than {self._rule.max_aspect} "
                    "times its width",
                    "Cut it, or leave the line out; the model's processor refuses it",
                )
            count += tokens
        return count

    def prompt(self, sample: Sample) -> int:
        """Return the prompt tokens, image tokens included; raises as `images` does."""
        count = len(sample.images)
        if count not in self._text_tokens:
            from transformers.utils.chat_template_utils import render_jinja_template  # takes 1 s

            messages = build_messages(sample, self._prompt, self._system)
            rendered: Any = render_jinja_template(
                [[message.model_dump(exclude_none=True) for message in messages]],
                chat_template=self._template,
                add_generation_prompt=True,
            )
            text = str(rendered[0][0])
            tokens = len(self._tokenizer.encode(text).ids) - text.count(self._placeholder)
            self._text_tokens[count] = tokens  # without image tokens
        return self._text_tokens[count] + self.images(sample)


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a `tokenizer.json`; raises ContractError for an invalid file."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise ContractError(
            str(file), f"it is no tokenizer ({error})", "Save the checkpoint's tokenizer again."
        ) from error


def chat_template(checkpoint: Path) -> str:
    """Return the chat template of a checkpoint's processor; raises ContractError without one."""
    alone = checkpoint / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        file = checkpoint / name
        template = read_json(file).get("chat_template") if file.is_file() else None
        if isinstance(template, str):
            return template
    raise ContractError(
        str(checkpoint),
        f"it has no chat template as text in {alone.name} or tokenizer_config.json",
        "Give the folder of a checkpoint saved with its processor",
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises ContractError for other content."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContractError(str(path), f"cannot be read ({error})", "Correct the file") from error
    if not isinstance(value, dict):
        raise ContractError(str(path), "it holds no JSON object", "Correct the file")
    return value
