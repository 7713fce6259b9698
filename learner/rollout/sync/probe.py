"""The proof of effect: whether a server answers with the weights of the trainer (SYNC-06).

The server's greedy answers to fixed prompts have log-probabilities, which one forward of the model
over each answer is compared with. A digest proves what arrived. This proves what the engines
compute with it: names that were swapped, a LoRA delta that was not merged, packed copies and caches
of old weights. A cache can be stale only for a prompt that was asked before the push.
"""

import base64
import io
import logging
from collections.abc import Sequence
from itertools import takewhile

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from learner.models.load import LoadedModel
from learner.models.prompts import EncodedPrompt, encode_request
from learner.rollout.answers import check_prompt_ids, output_of
from learner.rollout.hf import evaluating
from shared_contracts.errors import RunError
from shared_contracts.infer import (
    ImagePart,
    InferCall,
    Message,
    RequestConfig,
    RolloutEnvelope,
    RolloutInferRequest,
    TextPart,
)
from shared_contracts.rollout_config import Verify
from shared_contracts.weights import DtypeName

# Limit of the mean difference, in nats, by the type of the engines' weights. Without a fault it is
# 7e-7 in float32 and 0.011 in bfloat16; the faults that were injected gave 0.11 to 6.
LIMITS: dict[DtypeName, float] = {"float32": 1e-3}
LIMIT_OF_OTHERS = 0.05
# `verify: sample` proves the first push and every push after so many others.
SAMPLED = 100

NEW_TOKENS = 32

_LOG = logging.getLogger(__name__)

# Longer than the blocks in which engines cache prefixes.
_TEXT = (
    "Describe a market square early in the morning. Say which stalls are put up first, what is "
    "sold there, who comes to buy, how the light falls on the roofs, and what can be heard from "
    "the side streets. Then list everything again in the order of the alphabet, with a number "
    "for how much of it is left at noon."
)
_IMAGE_TEXT = "List every coloured shape in this image with its box."
_IMAGE_SIDE = 64


class WeightsDiffer(RunError):
    """A server computes with other weights than the trainer, although a push succeeded."""


class ProofOfEffect:
    """Decides which pushes are proven, and compares the answers."""

    def __init__(self, loaded: LoadedModel, verify: Verify) -> None:
        self._loaded = loaded
        self._verify = verify
        self._pushes = 0

    def is_due(self) -> bool:
        """Count a push; return whether it is to be proven."""
        self._pushes += 1
        if self._verify == "off":
            return False
        return self._verify == "full" or self._pushes % SAMPLED == 1

    def missed(self) -> None:
        """Have the next push proven, as no server answered."""
        self._pushes -= 1

    def check(self, url: str, envelopes: Sequence[RolloutEnvelope], dtype: DtypeName) -> float:
        """Return the mean |engine - trainer| of the log-probabilities of all answers, in nats.

        Raises WeightsDiffer if it is above the limit of `dtype`, and ContractError if the server
        encodes a prompt differently.
        """
        differences = torch.cat(
            [
                self._differences(name, request, envelope)
                for (name, request), envelope in zip(prompts().items(), envelopes, strict=True)
            ]
        )
        if not len(differences):
            _LOG.warning("the answers that prove a push are empty, so nothing is proven")
            return 0.0
        found, limit = float(differences.mean()), LIMITS.get(dtype, LIMIT_OF_OTHERS)
        if not found <= limit:
            raise WeightsDiffer(
                f"{url} does not compute with the weights that were pushed: its log-probabilities "
                f"differ from the trainer's by {found:.3g} nats in the mean, and at most {limit:g} "
                f"is rounding in {dtype} (rollout_matching.vllm.sync.verify)"
            )
        return found

    def _differences(
        self, name: str, request: RolloutInferRequest, envelope: RolloutEnvelope
    ) -> Tensor:
        """Return |engine - trainer| for each token of an answer; (T,) float32.

        The answer counts up to its first token of an image or a video: that token has a place for
        an image in the trainer's forward, and none in the engine's.
        """
        prompt, output = encode_request(self._loaded.processor, request), output_of(envelope)
        ours = prompt.ids.tolist()
        check_prompt_ids(name, ours, output.prompt_token_ids, self._loaded.tokenizer)
        vocab = self._loaded.vocab
        vision = vocab.end_ids - {vocab.end_id}
        read = list(takewhile(lambda token: token not in vision, output.response_token_ids))
        tokens = torch.tensor(read, dtype=torch.long)
        engine = torch.tensor(output.logprobs, dtype=torch.float32)[: len(read)]
        return (engine - self._log_probabilities(prompt, tokens)).abs()

    def _log_probabilities(self, prompt: EncodedPrompt, answer: Tensor) -> Tensor:
        """Return those of the T tokens of an answer; (T,) float32."""
        loaded, device = self._loaded, next(self._loaded.model.parameters()).device
        ids = torch.cat([prompt.ids, answer])
        types = torch.cat([prompt.mm_token_types, torch.zeros_like(answer)])
        family = loaded.family
        positions = family.positions(loaded.inner, ids, types, prompt.image_grid_thw)
        inputs: dict[str, Tensor | None] = {
            "input_ids": ids[None],
            "position_ids": positions[:, None],
            **family.vision_inputs(prompt, types[None]),
        }
        there = {name: t.to(device) for name, t in inputs.items() if t is not None}
        with evaluating(loaded.model):
            output = loaded.model(**there, attention_mask=None, use_cache=False)
        logits: Tensor = output.logits[0, prompt.ids.numel() - 1 : -1]
        return logits.float().cpu().log_softmax(-1).gather(-1, answer[:, None])[:, 0]


def probe_call(version: int | None = None) -> InferCall:
    return InferCall(
        infer_requests=list(prompts().values()),
        request_config=RequestConfig(max_tokens=NEW_TOKENS, return_details=True, logprobs=True),
        expected_weights_version=version,
    )


def prompts() -> dict[str, RolloutInferRequest]:
    """Return the prompts by name, the same in every run: a text, and an image with a text."""
    text, image = TextPart(type="text", text=_TEXT), ImagePart(type="image")
    about = TextPart(type="text", text=_IMAGE_TEXT)
    return {
        "text": RolloutInferRequest(messages=[Message(role="user", content=[text])]),
        "image": RolloutInferRequest(
            messages=[Message(role="user", content=[image, about])], images=[_image_url()]
        ),
    }


def _image_url() -> str:
    image = Image.new("RGB", (_IMAGE_SIDE, _IMAGE_SIDE), (235, 225, 200))
    pen = ImageDraw.Draw(image)
    pen.rectangle((4, 6, 28, 26), fill=(200, 30, 40))
    pen.polygon([(36, 30), (60, 30), (48, 8)], fill=(30, 140, 60))
    pen.ellipse((16, 34, 50, 60), fill=(40, 60, 210))
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
