"""Token counts of the prompt and the answer of a sample. Imports no torch.

The checkpoint supplies tokenizer and chat template. An image placeholder counts as the tokens of
its image.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from learner.data.checkpoint import Checkpoint
from learner.data.images import ImageInfo, image_problems, inspect_image
from learner.data.jsonl import build_request
from learner.stages.tokens import split_newlines
from learner.types import GroundTruthObject, Sample

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
