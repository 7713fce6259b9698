"""Whether a server answers as the model in training would (SYNC-06).

    prompts() -> the server's greedy answers -> one forward of the model over each -> results

At every position of an answer, its end included, the server's token must be the model's own
choice, or have a logit at most `MARGINS` below it: the two compute in different orders, and
perhaps precisions. Digests prove what the engines hold; a probe also proves what is made of
that, packed copies and cached prefixes and image features. Such a cache can only be stale
for a prompt that was asked before the push.
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from PIL import Image, ImageDraw
from torch import Tensor
from transformers import PreTrainedModel

from learner.models.families import vision_inputs
from learner.models.load import LoadedModel
from learner.models.packed_forward import EncodedPrompt, encode_request
from learner.rollout.answers import check_prompt_ids
from learner.rollout.hf import end_token_ids, evaluating
from learner.stages.tokens import decode_exactly
from shared_contracts.infer import (
    ImagePart,
    InferCall,
    Message,
    RequestConfig,
    RolloutEnvelope,
    RolloutInferRequest,
    TextPart,
)
from shared_contracts.weights import DtypeName

# By the type of the engines: so much below the best logit a token may be.
MARGINS: dict[DtypeName, float] = {
    "float64": 1e-2,
    "float32": 1e-2,
    "float16": 0.1,
    "bfloat16": 0.5,
}

NEW_TOKENS = 32

# Longer than the blocks in which engines cache prefixes.
_TEXT = (
    "Describe a market square early in the morning. Say which stalls are put up first, what is "
    "sold there, who comes to buy, how the light falls on the roofs, and what can be heard from "
    "the side streets. Then list everything again in the order of the alphabet, with a number "
    "for how much of it is left at noon."
)
_IMAGE_TEXT = "List every coloured shape in this image with its box."
_IMAGE_SIDE = 64

# Answers of a server to a call.
Ask = Callable[[InferCall], Sequence[RolloutEnvelope]]


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the model's own.

    position: in the answer. server, learner: the tokens there. margin: between their logits.
    """

    position: int
    server: int
    learner: int
    margin: float


@dataclass(frozen=True)
class ProbeResult:
    """compared: tokens of the answer, its end included. difference: the first one, if any."""

    prompt: str
    compared: int
    difference: Difference | None


class Probe:
    """Holds servers against a model.

    dtype: of the engines; decides the margin.
    """

    def __init__(self, loaded: LoadedModel, dtype: DtypeName) -> None:
        self._loaded = loaded
        self._margin = MARGINS[dtype]
        model = loaded.model
        plain = model.get_base_model() if isinstance(model, PeftModel) else model
        assert isinstance(plain, PreTrainedModel)
        self._ends = end_token_ids(plain, loaded.processor.tokenizer)

    def ask(self, ask: Ask, version: int | None = None) -> list[ProbeResult]:
        """Ask every prompt, of the weights `version` if given, and compare the answers.

        Raises:
            ContractError: the server encodes a prompt differently.
            RunError: what `ask` raises.
        """
        envelopes = ask(probe_call(version))
        return [
            self._compare(name, request, envelope)
            for (name, request), envelope in zip(prompts().items(), envelopes, strict=True)
        ]

    def describe(self, difference: Difference) -> str:
        """A difference in words."""
        server, learner = (
            f"{token} {decode_exactly(self._loaded.tokenizer, [token])!r}"
            for token in (difference.server, difference.learner)
        )
        return (
            f"token {difference.position}: the server says {server}, the learner {learner}, by "
            f"{difference.margin:.3g} (at most {self._margin:g} is rounding)"
        )

    def _compare(
        self, name: str, request: RolloutInferRequest, envelope: RolloutEnvelope
    ) -> ProbeResult:
        prompt = encode_request(self._loaded.processor, request)
        (choice,) = envelope.response.choices
        assert envelope.response.prompt_token_ids is not None
        assert choice.token_ids is not None
        theirs = envelope.response.prompt_token_ids
        check_prompt_ids(name, prompt.ids.tolist(), theirs, self._loaded.tokenizer)
        guarded = choice.index in envelope.coordexp.repeat_terminated_choices
        ended = choice.finish_reason == "stop" and not guarded
        logits = self._logits(prompt, choice.token_ids)
        wanted = [[token] for token in choice.token_ids] + ([self._ends] if ended else [])
        return ProbeResult(name, len(wanted), self._first_difference(logits, wanted))

    def _first_difference(
        self, logits: Tensor, wanted: Sequence[Sequence[int]]
    ) -> Difference | None:
        """logits: (T, V) or more rows. wanted: at each of T positions, what would be right."""
        for position, tokens in enumerate(wanted):
            row = logits[position]
            server = max(tokens, key=lambda token: float(row[token]))
            margin = float(row.max() - row[server])
            if not margin <= self._margin:
                return Difference(position, server, int(row.argmax()), margin)
        return None

    def _logits(self, prompt: EncodedPrompt, answer: Sequence[int]) -> Tensor:
        """Of every position of the answer and the one behind it; (T + 1, V) float32."""
        loaded, device = self._loaded, next(self._loaded.model.parameters()).device
        tail = torch.tensor(answer, dtype=torch.long)
        ids = torch.cat([prompt.ids, tail])
        types = torch.cat([prompt.mm_token_types, torch.zeros_like(tail)])
        family = loaded.family
        positions = family.positions(loaded.inner, ids, types, prompt.image_grid_thw)
        inputs: dict[str, Tensor | None] = {
            "input_ids": ids[None],
            "position_ids": family.position_ids(positions),
            **vision_inputs(family, prompt, types[None]),
        }
        there = {name: t.to(device) for name, t in inputs.items() if t is not None}
        with evaluating(loaded.model):
            output = loaded.model(**there, attention_mask=None, use_cache=False)
        logits: Tensor = output.logits[0, prompt.ids.numel() - 1 :]
        return logits.float().cpu()


def probe_call(version: int | None = None) -> InferCall:
    """Every prompt in one greedy call, to be answered with the weights `version` if given."""
    return InferCall(
        infer_requests=list(prompts().values()),
        request_config=RequestConfig(max_tokens=NEW_TOKENS, return_details=True),
        expected_weights_version=version,
    )


def prompts() -> dict[str, RolloutInferRequest]:
    """The same in every run: one of text alone, one with an image, by name."""
    text, image = TextPart(type="text", text=_TEXT), ImagePart(type="image")
    about = TextPart(type="text", text=_IMAGE_TEXT)
    return {
        "text": RolloutInferRequest(messages=[Message(role="user", content=[text])]),
        "image": RolloutInferRequest(
            messages=[Message(role="user", content=[image, about])], images=[_image_url()]
        ),
    }


def _image_url() -> str:
    """A PNG of three shapes on a bright ground."""
    image = Image.new("RGB", (_IMAGE_SIDE, _IMAGE_SIDE), (235, 225, 200))
    pen = ImageDraw.Draw(image)
    pen.rectangle((4, 6, 28, 26), fill=(200, 30, 40))
    pen.polygon([(36, 30), (60, 30), (48, 8)], fill=(30, 140, 60))
    pen.ellipse((16, 34, 50, 60), fill=(40, 60, 210))
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
