"""Images as arguments of a client: bytes, files, parts of messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from mlxpool.client import request
from mlxpool.common.errors import PoolError
from mlxpool.common.options import GenerateOptions
from mlxpool.common.protocol.from_client import Generate
from mlxpool.common.protocol.images import MAX_IMAGE

NONE = cast(GenerateOptions, {})


def made(images: Any = (), **prompt: Any) -> tuple[dict[str, Any], list[bytes]]:
    texts = (prompt.get("prompt"), prompt.get("messages"), prompt.get("tokens"))
    draft = request.generate("m", *texts, NONE, images)
    body, blobs = draft.body(), draft.blobs()
    Generate.parse(body, blobs)  # the broker reads what we write
    return body, list(blobs)


def test_images_of_a_text(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"in a file")
    images = [file, b"bytes", bytearray(b"more"), memoryview(b"view")]
    body, blobs = made(images, prompt="[img-0][img-1][img-2][img-3]")
    assert body["images"] == 4
    assert blobs == [b"in a file", b"bytes", b"more", b"view"]


def test_images_of_a_long_text_are_behind_it() -> None:
    text = "x" * 100_000 + "[img-0]"
    body, blobs = made([b"a"], prompt=text)
    assert (body["prompt"], body["images"], blobs) == (True, 1, [text.encode(), b"a"])


def test_images_in_messages_are_named_by_index() -> None:
    parts = [
        {"type": "image", "image": b"second"},
        {"type": "text", "text": "and"},
        {"type": "image", "blob": 0},
    ]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "image", "image": b"third"}]},
    ]
    body, blobs = made([b"first"], messages=messages)
    assert blobs == [b"first", b"second", b"third"]
    named = [part.get("blob") for message in body["messages"][::2] for part in message["content"]]
    assert named == [1, None, 0, 2]
    assert parts[0] == {"type": "image", "image": b"second"}, "the given messages stay as they are"


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (b"one", "images must be a list of images, got bytes"),
        (["a.png"], r"images\[0\] must be the bytes.*pathlib.Path, got 'a.png'"),
        ([b"a", Path("/nowhere/b.png")], r"images\[1\] cannot be read: .*No such file"),
        ([b"a", b""], r"images\[1\] is empty"),
        ([b"a"] * 100, "100 images, at most 16"),
        ([bytes(MAX_IMAGE + 1)], r"images\[0\] has 8388609 bytes"),
    ],
)
def test_what_is_no_image_is_refused_before_it_is_sent(images: Any, words: str) -> None:
    with pytest.raises(PoolError, match=words):
        made(images, prompt="[img-0]")


def test_only_the_begin_of_a_huge_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "huge"
    with file.open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(PoolError, match=r"images\[0\] has 8388609 bytes"):
        made([file], prompt="[img-0]")


def test_images_beside_the_content_of_a_message_are_refused() -> None:
    messages = [{"role": "user", "content": "hi", "images": [b"a"]}]
    with pytest.raises(
        PoolError, match=r"messages\[0\].images is not .* {type: 'image', image: …}"
    ):
        made(messages=messages)


def test_token_ids_have_no_images() -> None:
    with pytest.raises(PoolError, match="images require prompt or messages, got tokens"):
        made([b"a"], tokens=[1])
