"""Images put into their places in a conversation."""

from typing import Any

import pytest

from rollout_server.engines.engine_protocol import ChatMessage
from rollout_server.runtime.refusals import BadRequest
from rollout_server.serving.infer import read_conversation
from rollout_server.serving.media import ImageSource
from rollout_server.serving.prompts import Conversation
from shared_contracts.infer import RolloutInferRequest


def read(*contents: Any, images: list[str] | str = ()) -> Conversation:  # type: ignore[assignment]
    messages = [{"role": "user", "content": content} for content in contents]
    request = {"messages": messages, "images": images if isinstance(images, str) else list(images)}
    return read_conversation(RolloutInferRequest.model_validate(request))


def image(url: str | None = None) -> dict[str, Any]:
    return {"type": "image", "image": url}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.mark.req("WIRE-01")
def test_marks_and_parts_are_the_same_conversation() -> None:
    marked = read("<image>What is this?", images=["a.png"])
    parts = read([image(), text("What is this?")], images=["a.png"])
    assert marked == parts
    assert marked.messages == [ChatMessage("user", [None, "What is this?"])]
    assert marked.sources == [ImageSource("images[0]", "a.png")]


def test_text_around_and_between_marks_stays() -> None:
    (message,) = read("a <image> b<image><image>c", images=["1", "2", "3"]).messages
    assert message.parts == ["a ", None, " b", None, None, "c"]


def test_text_without_images_is_one_part() -> None:
    assert read("hello").messages == [ChatMessage("user", ["hello"])]
    assert read("").messages == [ChatMessage("user", [""])]


def test_images_fill_the_open_places_in_order_of_the_conversation() -> None:
    conversation = read([image("own.png"), image()], "<image>", images=["x", "y"])
    assert conversation.sources == [
        ImageSource("messages[0].content[0].image", "own.png"),
        ImageSource("images[0]", "x"),
        ImageSource("images[1]", "y"),
    ]


@pytest.mark.req("WIRE-05")
@pytest.mark.parametrize(
    ("content", "images"),
    [("<image>", []), ("no mark", ["a.png"]), ("<image>", ["a", "b"]), ([image("own")], ["a"])],
)
def test_images_must_match_their_places(content: Any, images: list[str]) -> None:
    with pytest.raises(BadRequest) as error:
        read(content, images=images)
    assert error.value.where == "images"
