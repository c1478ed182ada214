"""The prompt of a request in its three forms: text, packed text or token ids, and chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.protocol import images as images_of
from mlxpool.common.protocol.chat import check_messages, check_think, check_tools
from mlxpool.common.protocol.frames import MAX_BLOB
from mlxpool.common.protocol.token_ids import ID_WIDTH

KEYS = ("prompt", "messages", "tokens")


class TextPrompt(Struct, frozen=True):
    """A text that is tokenised without a template. It names each of its `images` by `[img-n]`."""

    text: str
    images: tuple[bytes, ...] = ()

    def body(self) -> dict[str, Any]:
        return {"prompt": self.text, **_image_count(self.images)}

    def blobs(self) -> tuple[bytes, ...]:
        return self.images

    @property
    def size(self) -> int:
        """Bytes of the text in UTF-8."""
        return _text_bytes(self.text)


class PackedPrompt(Struct, frozen=True):
    """Text in UTF-8 (`prompt`) or packed token ids (`tokens`), sent as the first blob.

    The `images` of a text are the blobs after it; a prompt of token ids has no images.
    """

    key: Literal["prompt", "tokens"]
    blob: bytes
    images: tuple[bytes, ...] = ()

    def body(self) -> dict[str, Any]:
        return {self.key: True, **_image_count(self.images)}

    def blobs(self) -> tuple[bytes, ...]:
        return (self.blob, *self.images)

    @property
    def size(self) -> int:
        """Bytes of the blob."""
        return len(self.blob)


class ChatPrompt(Struct, frozen=True):
    """Messages for the model's chat template, with tools and the level of thinking.

    `messages` and `tools` are as the client sent them; `check_messages` converts them for
    templates. Parts of messages name the `images` by their index.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    think: bool | str | None = None
    images: tuple[bytes, ...] = ()

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": self.messages}
        if self.tools:
            body["tools"] = self.tools
        if self.think is not None:
            body["think"] = self.think
        return body | _image_count(self.images)

    def blobs(self) -> tuple[bytes, ...]:
        return self.images

    @property
    def size(self) -> int:
        """Bytes in UTF-8 of all texts in the messages and tools, at any depth."""
        return _text_bytes(self.messages) + _text_bytes(self.tools)


Prompt = TextPrompt | PackedPrompt | ChatPrompt


def _image_count(images: Sequence[bytes]) -> dict[str, Any]:
    return {images_of.KEY: len(images)} if images else {}


def image_bytes(prompt: Prompt) -> int:
    """Returns the total bytes of the image files of a prompt."""
    return sum(map(len, prompt.images))


def parse_prompt(body: Mapping[str, Any], blobs: Sequence[bytes]) -> Prompt:
    """Returns the prompt of a `generate` with its images. Raises BadRequest naming the key."""
    keys = [key for key in KEYS if body.get(key) not in (None, False)]
    if len(keys) != 1:
        raise BadRequest(f"give one of prompt, messages, tokens; got {keys or 'none'}")
    if keys == ["messages"]:
        return _chat(body, blobs)
    for key, words in (("tools", "tools go"), ("think", "think goes")):
        if body.get(key) not in (None, []):
            raise BadRequest(f"{words} with messages, got {keys[0]}")
    if keys == ["prompt"] and isinstance(body["prompt"], str):
        return _text(body, blobs)
    return _packed("tokens" if keys == ["tokens"] else "prompt", body, blobs)


def blobs_of_prompt(body: Mapping[str, Any]) -> int:
    """Returns the number of a prompt's blobs: one if it is packed, and one for each image."""
    packed = body.get("prompt") is True or body.get("tokens") is True
    return int(packed) + images_of.count_images(body)


def _text(body: Mapping[str, Any], blobs: Sequence[bytes]) -> TextPrompt:
    text = body["prompt"]  # an empty text counts as the model's begin token, if it has one
    images = images_of.parse_images(body, blobs, 0)
    if images:
        images_of.check_named(images_of.images_of_text(text), len(images))
    return TextPrompt(text, images)


def _packed(
    key: Literal["prompt", "tokens"], body: Mapping[str, Any], blobs: Sequence[bytes]
) -> PackedPrompt:
    if body[key] is not True:
        raise BadRequest(f"{key} must be {'text or ' * (key == 'prompt')}true with a blob")
    if not blobs or not blobs[0]:
        raise BadRequest(f"{key} is true, but its blob is missing or empty")
    if len(blobs[0]) > MAX_BLOB:
        raise TooLarge(f"the blob of {key} has {len(blobs[0])} bytes, at most {MAX_BLOB}")
    if key == "tokens" and len(blobs[0]) % ID_WIDTH:
        raise BadRequest(f"the blob of tokens has {len(blobs[0])} bytes, no multiple of {ID_WIDTH}")
    images = images_of.parse_images(body, blobs, 1)
    if images and key == "tokens":
        raise BadRequest("images require prompt or messages, got tokens")
    return PackedPrompt(key, blobs[0], images)


def _chat(body: Mapping[str, Any], blobs: Sequence[bytes]) -> ChatPrompt:
    checked = check_messages(body["messages"])
    tools = body["tools"] if check_tools(body.get("tools")) else None
    images = images_of.parse_images(body, blobs, 0)
    images_of.check_named(images_of.images_of_messages(checked), len(images))
    return ChatPrompt(body["messages"], tools, check_think(body.get("think")), images)


def _text_bytes(value: object) -> int:
    """Returns the bytes in UTF-8 of all texts in a value, at any depth."""
    size, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            size += len(item.encode("utf-8", "surrogatepass"))
        elif isinstance(item, Mapping):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
    return size
