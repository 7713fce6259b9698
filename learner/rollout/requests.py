"""A sample as a conversation: the one prompt both the server and the learner encode."""

from learner.types import Sample
from shared_contracts.infer import ContentPart, ImagePart, Message, RolloutInferRequest, TextPart


def build_messages(sample: Sample, prompt: str, system: str | None) -> list[Message]:
    """System text if any, then one user turn: the images, then the instruction."""
    content: list[ContentPart] = [ImagePart(type="image") for _ in sample.images]
    content.append(TextPart(type="text", text=prompt))
    messages = [Message(role="system", content=system)] if system is not None else []
    return [*messages, Message(role="user", content=content)]


def build_request(sample: Sample, prompt: str, system: str | None) -> RolloutInferRequest:
    """The `/infer/` request of a sample; images travel as paths the server can read."""
    return RolloutInferRequest(
        messages=build_messages(sample, prompt, system),
        images=[str(path) for path in sample.images],
        uuid=sample.sample_id,
    )
