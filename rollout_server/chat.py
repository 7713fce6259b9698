"""From a wire request to a conversation with its images in place (WIRE-01).

Pure: no engine, no file is touched. A message holds its images either as image parts or,
when its content is text, as `<image>` marks; `images[]` fills in order the marks and the
parts that bring no image of their own.
"""

from dataclasses import dataclass

from rollout_server.problems import BadRequest
from shared_contracts.infer import ImagePart, Message, Role, RolloutInferRequest

IMAGE_MARK = "<image>"


@dataclass(frozen=True)
class ChatMessage:
    """parts: text, or None where the next image stands."""

    role: Role
    parts: list[str | None]


@dataclass(frozen=True)
class Conversation:
    """sources: one image string per None in the messages' parts, in order."""

    messages: list[ChatMessage]
    sources: list["ImageSource"]


@dataclass(frozen=True)
class ImageSource:
    """where: the spot in the request the string stands at, such as `images[0]`."""

    where: str
    image: str


def read_conversation(request: RolloutInferRequest) -> Conversation:
    """Put the images of `request` into place.

    Raises BadRequest when there are more or fewer of them than places.
    """
    messages = [ChatMessage(m.role, _parts(m)) for m in request.messages]
    own = [source for i, m in enumerate(request.messages) for source in _own_images(m, i)]
    listed = [ImageSource(f"images[{i}]", image) for i, image in enumerate(request.images)]
    open_places = own.count(None)
    if open_places != len(listed):
        raise BadRequest(
            "images",
            f"{len(listed)} given, but the messages have room for {open_places}: one per "
            f"{IMAGE_MARK} mark or image part without an image of its own",
        )
    fill = iter(listed)
    return Conversation(messages, [source or next(fill) for source in own])


def _parts(message: Message) -> list[str | None]:
    """Text and image places of a message, without empty text."""
    if isinstance(message.content, str):
        pieces = message.content.split(IMAGE_MARK)
        marked: list[str | None] = [pieces[0]]
        for piece in pieces[1:]:
            marked += [None, piece]
        return [part for part in marked if part != ""] or [""]
    return [None if isinstance(part, ImagePart) else part.text for part in message.content]


def _own_images(message: Message, index: int) -> list[ImageSource | None]:
    """For each image place of a message its own image, or None if `images[]` fills it."""
    if isinstance(message.content, str):
        return [None] * message.content.count(IMAGE_MARK)
    return [
        None
        if part.image is None
        else ImageSource(f"messages[{index}].content[{number}].image", part.image)
        for number, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]
