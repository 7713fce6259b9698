"""How many tokens the prompt and the answer of a sample take. Imports no torch.

The tokenizer is the checkpoint's `tokenizer.json`, the prompt is rendered with its chat template,
and every image placeholder in it counts as many tokens as its image takes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from learner.data.image_tokens import MAX_ASPECT, ImageRule, read_json
from learner.data.images import upright_size
from learner.types import GroundTruthObject, Sample
from shared_contracts.errors import ContractError

IMAGE_PAD = "<|image_pad|>"

WriteAnswer = Callable[[Sequence[GroundTruthObject]], str]
# The messages of a sample, as chat templates take them.
WriteMessages = Callable[[Sample], list[dict[str, Any]]]


class TokenLimits(NamedTuple):
    """What the samples of a run must fit into.

    answer: `rollout_matching.max_new_tokens`.
    pack: `global_max_length`; None where samples are not packed.
    """

    answer: int
    pack: int | None


class SampleLengths:
    """Measures samples for one checkpoint.

    write_answer: the objects as the model is taught to write them.
    write_messages: differs between samples by the number of images only; None where no prompt
        is known.
    limits: None where no run sets any.
    """

    def __init__(
        self,
        checkpoint: Path,
        write_answer: WriteAnswer,
        write_messages: WriteMessages | None = None,
        limits: TokenLimits | None = None,
    ) -> None:
        self.limits = limits
        self._tokenizer = read_tokenizer(checkpoint / "tokenizer.json")
        self._rule = ImageRule.of_checkpoint(checkpoint)
        self._template = chat_template(checkpoint)
        self._write_answer = write_answer
        self._write_messages = write_messages
        self._text_tokens: dict[int, int] = {}

    @property
    def knows_prompt(self) -> bool:
        return self._write_messages is not None

    def target(self, sample: Sample) -> int:
        """Tokens of the answer that names every object, with its EOS."""
        text = self._write_answer(sample.objects)
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids) + 1

    def images(self, sample: Sample) -> int:
        """Image tokens.

        Raises ContractError for an image that is too narrow for the processor, and
        UnreadableImage for one after the first that cannot be opened.
        """
        first = (sample.width, sample.height)
        return sum(
            self._image(sample, size)
            for size in (first, *(upright_size(path) for path in sample.images[1:]))
        )

    def prompt(self, sample: Sample) -> int:
        """Tokens before the answer, those of the images included; raises as `images` does."""
        count = len(sample.images)
        if count not in self._text_tokens:
            self._text_tokens[count] = self._text(sample)
        return self._text_tokens[count] + self.images(sample)

    def _image(self, sample: Sample, size: tuple[int, int]) -> int:
        tokens = self._rule.tokens(*size)
        if tokens is None:
            raise ContractError(
                sample.sample_id,
                f"an image of {size[0]}x{size[1]} pixels: longer than {MAX_ASPECT} times its width",
                "Cut it, or leave the line out; the model's processor refuses it",
            )
        return tokens

    def _text(self, sample: Sample) -> int:
        """Tokens of a prompt without those of its images."""
        assert self._write_messages is not None
        text = _render(self._template, self._write_messages(sample))
        return len(self._tokenizer.encode(text).ids) - text.count(IMAGE_PAD)


def read_tokenizer(file: Path) -> Tokenizer:
    """A `tokenizer.json`; ContractError for what is none."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises a bare one
        raise ContractError(
            str(file), f"it is no tokenizer ({error})", "Save the checkpoint's tokenizer again."
        ) from error


def chat_template(checkpoint: Path) -> str:
    """The template a checkpoint's processor uses; ContractError where there is none."""
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
        f"it has no {alone.name}",
        "Give the folder of a checkpoint saved with its processor",
    )


def _render(template: str, messages: list[dict[str, Any]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template  # a second

    rendered: Any = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True
    )
    return str(rendered[0][0])
